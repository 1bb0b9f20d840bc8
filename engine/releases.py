"""The folder `<state>/releases/`: what was shipped and rolled back, one signed file each, `<n>-<forward>.json` in order."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tideforge.engine.keys import Trusted, write_synced
from tideforge.engine.release import Decision, Release, verify
from tideforge.errors import Refused

NAME = re.compile(r"^(\d+)-.*\.json$")


@functools.cache
def warn(line: str) -> None:
    """Once a line, on standard error."""
    print(f"tideforge: {line}", file=sys.stderr, flush=True)


def release_files(folder: Path, warn: Callable[[str], None] = warn) -> list[tuple[int, dict[str, Any]]]:
    """Number and content of each file, in order. One that cannot be read is passed over with a warning of one line."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            raw, name = json.loads(path.read_text()), NAME.match(path.name)
            if name is None or not isinstance(raw, dict):
                raise ValueError("not a release")
            Release.from_record(raw.get("record"))
            found.append((int(name[1]), raw))
        except (OSError, ValueError, Refused) as error:
            said = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            warn(f"{path}: is no release that can be read ({said}) and is passed over; restore it or move it elsewhere")
    return sorted(found, key=lambda entry: entry[0])


def next_number(folder: Path) -> int:
    """One above every name there, readable or not, so that no file is replaced."""
    names = (NAME.match(path.name) for path in folder.glob("*.json"))
    return 1 + max((int(name[1]) for name in names if name), default=0)


def shipped_release(folder: Path, trusted: Trusted, warn: Callable[[str], None] = warn) -> Release | None:
    """What the newest file put into service: what a server starts with. None when there is none.

    Files that carry no signature of a trusted approver are passed over; expiry counts at the ship, not here.
    """
    for _, raw in reversed(release_files(folder, warn)):
        with contextlib.suppress(Refused):
            approved = verify(raw["record"], raw.get("code"), trusted)
            if approved.decision is not Decision.REJECT:
                return approved.release
    return None


@contextlib.contextmanager
def prepared(folder: Path, forward: str, entry: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """The next file, whole on the disk under another name; the call that this yields puts it in place.

    So a disk that is full shows before a code is used up, and not after. Raises OSError; nothing is left behind then.
    """
    folder.mkdir(exist_ok=True)
    target = folder / f"{next_number(folder):04d}-{forward[:12]}.json"
    temporary = folder / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        write_synced(temporary, json.dumps(entry, indent=1).encode())
        yield lambda: os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
