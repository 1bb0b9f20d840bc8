"""What flow and tasks hand to each other: JSON with paths and hashes, never data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import stored_endpoint
from tideforge.tasks.store import Manifest, Run

Handle = dict[str, Any]  # a manifest as JSON; of the night itself: endpoint, run, folder


def opened(night: Handle) -> tuple[Run, Endpoint]:
    """Run and endpoint as they were when the night began: editing the endpoint file does not change a running night."""
    run = Run(Path(night["folder"]))
    return run, stored_endpoint(run)


def handle(manifest: Manifest) -> Handle:
    return dict(manifest.model_dump(mode="json", exclude={"started", "finished"}))
