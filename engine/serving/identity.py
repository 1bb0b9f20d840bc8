"""What the server is: everything an approval is bound to besides the forward."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tideforge.engine.config import Settings

PACKAGES = ("torch", "triton", "numpy", "tideforge")


@dataclasses.dataclass(frozen=True)
class Identity:
    """`launch` is the endpoint's launch command; `environment` is what a measured figure depends on, sorted."""

    endpoint: str
    weights_sha256: str
    launch: str
    environment: tuple[tuple[str, str], ...]
    state: Path


def environment(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Names and values that stay the same from start to start on one machine."""
    facts = {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "precision": settings.dtype,
        "block_size": str(settings.block_size),
        "num_blocks": str(settings.num_blocks),
        "max_num_seqs": str(settings.limits.max_num_seqs),
        "max_model_len": str(settings.limits.max_model_len),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    return tuple(sorted(facts.items()))
