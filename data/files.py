"""Files that are either whole or absent: written under a temporary name, then renamed. Hashes of files and values."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tideforge.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


def canonical_json(value: Any) -> bytes:
    """One spelling for a value, so that equal values have equal hashes. NaN is refused: JSON has no word for it."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()


def sha256_bytes(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, make: Callable[[Any], T], remedy: str) -> T:
    """A JSON file of the state folder as `make` makes it. UserError with the remedy where it is truncated or holds something else.

    A file that is absent or may not be read stays an OSError.
    """
    try:
        return make(json.loads(path.read_bytes()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, IsADirectoryError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(str(path), f"is damaged ({said[:200]})", remedy) from error


def set_aside(path: Path) -> Path:
    """Renames what cannot be read, so that nobody tries again and a person can look at it; the new name."""
    return path.rename(path.with_name(f"{path.name}.damaged"))


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside `target` that becomes `target` when the block ends well and vanishes when not.

    A full disk (or quota) becomes a UserError that names the folder. The temporary name holds the process id, so that
    `sweep` knows what killed processes left.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with full_disk_named(target.parent):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_whole(target: Path, raw: bytes) -> None:
    with whole(target) as temporary:
        temporary.write_bytes(raw)


def sweep(folder: Path, pattern: str) -> None:
    """Removes the temporary files and folders (`...<process id>-<random>...`) of that pattern whose process is gone."""
    for left in folder.glob(pattern):
        owner = re.search(r"\.(\d+)-\w+(\.tmp)?$", left.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """A full disk (or quota) becomes a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(folder) from error
        raise


def disk_full(folder: Path) -> UserError:
    return UserError(str(folder), "the disk is full", "free space there or point the endpoint's `state` elsewhere")
