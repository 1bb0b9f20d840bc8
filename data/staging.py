"""Logs as plain local files: what is compressed or elsewhere is copied for as long as it is read."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from tideforge.data.files import FULL, disk_full
from tideforge.data.s3 import WILD, S3Object, explained, open_object
from tideforge.errors import UserError

Location = Path | S3Object
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
CHUNK = 8 << 20


def raw(location: Location) -> IO[bytes] | pa.NativeFile:
    if isinstance(location, S3Object):
        return open_object(location)
    try:
        return location.open("rb")
    except FileNotFoundError:
        raise UserError(str(location), "does not exist", "give files, folders or globs of traffic logs") from None
    except OSError as error:
        raise UserError(str(location), f"cannot be read ({error.strerror})", "give a readable file") from None


def compression(location: Location) -> str:
    """gzip, zstd or "", by the first bytes and not by the name."""
    with raw(location) as file, readable(location, ""):
        magic = file.read(4)
    return next((name for start, name in COMPRESSIONS.items() if magic.startswith(start)), "")


@contextlib.contextmanager
def readable(location: Location, packed: str) -> Iterator[None]:
    if not packed and isinstance(location, S3Object):
        with explained(location.url):
            yield
        return
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        problem = f"is truncated or damaged {packed}" if packed else "cannot be read"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(str(location), f"{problem} ({reason})", "write the file again") from None


@contextlib.contextmanager
def unpacked(location: Location, packed: str) -> Iterator[Any]:
    with raw(location) as file:
        if packed == "gzip":
            yield gzip.GzipFile(fileobj=file)
        elif packed == "zstd":
            yield pa.CompressedInputStream(file if isinstance(file, pa.NativeFile) else pa.PythonFile(file), "zstd")
        else:
            yield file


def first_bytes(location: Location, number: int) -> bytes:
    """Of what is in the file once it is unpacked."""
    packed = compression(location)
    with unpacked(location, packed) as file, readable(location, packed):
        return bytes(file.read(number))


@contextlib.contextmanager
def plain(location: Location) -> Iterator[Path]:
    """A plain local file with the content; a copy vanishes with the block. UserError when it cannot be unpacked."""
    packed = compression(location)
    here = isinstance(location, Path) and not packed
    if here and not WILD.search(str(location)):
        yield Path(str(location))
        return
    with tempfile.TemporaryDirectory(prefix="tideforge-log-") as scratch:
        target = Path(scratch) / "log"
        if here:
            target.symlink_to(Path(str(location)).resolve())  # DuckDB would take the name for a pattern
        else:
            with unpacked(location, packed) as file:
                copy(location, packed, file, target)
        yield target


def copy(location: Location, packed: str, file: Any, target: Path) -> None:
    with noticed(target), target.open("wb") as out:
        while True:
            with readable(location, packed):
                chunk = file.read(CHUNK)
            if not chunk:
                return
            out.write(chunk)


@contextlib.contextmanager
def noticed(target: Path) -> Iterator[None]:
    """A full disk names the folder and says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(target.parent) from error
        raise


@contextlib.contextmanager
def valid_text(path: Path) -> Iterator[Path]:
    """A copy in which what is no UTF-8 is U+FFFD and a mark of byte order is gone, so that one bad byte spoils one line."""
    with tempfile.TemporaryDirectory(prefix="tideforge-log-") as scratch:
        target = Path(scratch) / "log"
        with (
            noticed(target),
            path.open(encoding="utf-8-sig", errors="replace", newline="") as source,
            target.open("w", encoding="utf-8", newline="") as out,
        ):
            shutil.copyfileobj(source, out, CHUNK)
        yield target
