"""One process at a time works on a folder. Who does so holds a lock on a file there until it ends, however it ends."""

from __future__ import annotations

import fcntl
import io
import os
import struct
from pathlib import Path

from tideforge.errors import UserError

_FLOCK = "hhqqi0q"  # struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, pid
_held: dict[Path, io.IOBase] = {}


def claim(path: Path, folder: Path, what: str, remedy: str) -> None:
    """Holds `path`, the lock of `folder`, until this process ends; its children do not. UserError that names `what` holds it already.

    Closing any other descriptor of the file in this process would give up the lock.
    """
    if path in _held:
        return
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(str(folder), f"{what} works on it already (pid {holder(path) or 'unknown'})", remedy) from None
    _held[path] = file


def holder(path: Path) -> int | None:
    """The process that has claimed `path`, None where none has. Not for the process itself, which would give up its claim."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else int(pid)
