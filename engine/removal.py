"""Ends folders that somebody else filled: however deep, whatever they allow, wherever their links lead.

Standard library only. Folders are opened one at a time, by descriptors that follow no link, and what lies in one is moved up
beside it. So no path is longer than a name, nothing recurses, and no more than three descriptors are open.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path


def remove(path: Path, most_s: float = math.inf) -> bool:
    """Whether nothing is there any more: a file, a link or a folder with all that is in it. Raises nothing.

    What the caller may not remove stays, and so does what is left after `most_s` seconds.
    """
    end = time.monotonic() + most_s
    with contextlib.suppress(OSError):
        above = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            if not _unlinked(above, path.name):
                with _opened(above, path.name) as folder:
                    _empty(folder, end)
                os.rmdir(path.name, dir_fd=above)
        finally:
            os.close(above)
    return not os.path.lexists(path)


def _unlinked(folder: int, name: str) -> bool:
    """False where it is a folder."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    except FileNotFoundError:
        pass
    return True


@contextlib.contextmanager
def _opened(above: int, name: str) -> Iterator[int]:
    """A folder, made to allow everything to its owner. OSError where it is none, or a link to one."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        with contextlib.suppress(PermissionError):  # somebody else's; it may allow enough
            os.chmod(f"/proc/self/fd/{found}", 0o700)
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=found)
    finally:
        os.close(found)
    try:
        yield folder
    finally:
        os.close(folder)


def _empty(folder: int, end: float) -> None:
    """Takes out what can be taken out until time.monotonic() is past `end`."""
    names, mark, number = os.listdir(folder), secrets.token_hex(8), itertools.count()
    while names and time.monotonic() < end:
        with contextlib.suppress(OSError):
            if _unlinked(folder, name := names.pop()):
                continue
            with _opened(folder, name) as inner:
                for each in os.listdir(inner):
                    if time.monotonic() >= end:
                        return
                    with contextlib.suppress(OSError):
                        if not _unlinked(inner, each):
                            names.append(_moved_up(inner, each, folder, f"{mark}-{next(number)}"))
            os.rmdir(name, dir_fd=folder)


def _moved_up(inner: int, name: str, folder: int, new: str) -> str:
    """`new`, which the folder `name` is called in `folder` from now on."""
    with _opened(inner, name):  # a move changes its "..", which it must allow
        os.rename(name, new, src_dir_fd=inner, dst_dir_fd=folder)
    return new
