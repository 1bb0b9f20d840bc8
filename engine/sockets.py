"""Unix sockets at a path of any length: what is too long for the kernel is reached through its folder's descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LONGEST = 107  # bytes, unix(7)


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """What bind and connect take for `path`. Raises FileNotFoundError or NotADirectoryError for a folder that is none."""
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(path: Path) -> socket.socket:
    """Raises FileNotFoundError or ConnectionRefusedError where nobody listens."""
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with address(path) as place:
            sock.connect(place)
        undo.pop_all()
        return sock


def listen(path: Path, backlog: int) -> socket.socket:
    """Takes the place of a socket that is there: whoever asks holds the folder's lock (claim.py). Only its user may connect."""
    path.unlink(missing_ok=True)
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with address(path) as place:
            sock.bind(place)
        os.chmod(path, 0o600)
        sock.listen(backlog)
        undo.pop_all()
        return sock
