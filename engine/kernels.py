"""Folders of compiled kernels, copied between what an authority keeps and what a worker writes.

A worker compiles into a folder of its own, and a candidate can put anything there: of it only regular files are taken, and no
link is followed, whatever is changed meanwhile.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

MOST_FILES = 20_000
MOST_BYTES = 1 << 30
UNFINISHED = "tmp."  # Triton writes under such names before it renames
GROUP = "__grp__"  # such files name the files of one kernel, by their whole paths


def copy_kernels(source: Path, target: Path) -> None:
    """Adds the files below `source` to those below `target`, the same names replaced; at most MOST_FILES and MOST_BYTES.

    `target` is a folder that no candidate can write yet. Where there is no `source`, there is nothing to copy.
    """
    if not source.is_dir():
        return
    files, room = 0, MOST_BYTES
    for folder, folders, names, fd in os.fwalk(source, follow_symlinks=False):
        folders[:] = [name for name in folders if not name.startswith(UNFINISHED)]
        into = target / Path(folder).relative_to(source)
        for name in names:
            if files >= MOST_FILES or name.startswith(UNFINISHED):
                continue
            data = _content(name, fd, room)
            if data is not None and name.startswith(GROUP):
                data = _moved(data, into)
            if data is not None:
                files, room = files + 1, room - len(data)
                _write(into / name, data)


def _content(name: str, folder: int, most: int) -> bytes | None:
    """None for what is no regular file, is gone, or has more than `most` bytes."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size > most:
            return None
        data = file.read(most + 1)
    return data if len(data) <= most else None


def _moved(data: bytes, folder: Path) -> bytes | None:
    """A group's file whose members lie in `folder`; None for what is no such file. Triton compiles anew what it does not find there."""
    try:
        members = json.loads(data)["child_paths"]
        return json.dumps({"child_paths": {str(name): str(folder / Path(name).name) for name in members}}).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: others may read the folder meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{UNFINISHED}{os.getpid()}.{path.name}")
    part.write_bytes(data)
    part.replace(path)
