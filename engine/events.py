"""The state folder's events.jsonl: one JSON object a line, appended with single writes. Reports are recomputed from it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tideforge.data.files import FULL

FILE = "events.jsonl"


def log_event(state: Path, event: str, **fields: Any) -> None:
    """Appends one event with the time in seconds since the epoch.

    What it tells of has happened, so a full disk does not undo it: the event is lost, and standard error says so.
    """
    line = json.dumps({"time": time.time(), "event": event, "pid": os.getpid(), **fields}) + "\n"
    try:
        fd = os.open(state / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"tideforge: {state / FILE}: the disk is full; lost: {line}", end="", file=sys.stderr, flush=True)


def read_events(state: Path) -> Iterator[dict[str, Any]]:
    """Yields the events in order; a line torn by a kill is passed over."""
    return (raw for raw in read_lines(state / FILE) if "event" in raw)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file that is appended to, in order; what is none is passed over. Nothing where no file is."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(raw := json.loads(line), dict):
                yield raw
