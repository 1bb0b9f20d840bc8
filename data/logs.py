"""Which files a list of names means, and what kind of file each is, by looking at its first bytes."""

from __future__ import annotations

import csv
import dataclasses
import glob
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from tideforge.data.s3 import SCHEME, S3Object, under
from tideforge.data.staging import Location, first_bytes
from tideforge.errors import UserError

SUFFIXES = (".parquet", ".csv", ".jsonl", ".ndjson", ".json", ".log")
ENDINGS = re.compile(r"\.(parquet|csv|jsonl|ndjson|json|log)(\.\d{4}-[\d_-]+)?(\.(gz|zst|zstd))?$")
PARTITION = re.compile(r"\w+=[^/]+|\d{1,4}|\d{8}|\d{4}-\d{2}(-\d{2})?")
SAMPLE = "sample:"
PARQUET_MAGIC = b"PAR1"
HEAD_BYTES = 1 << 20
LINES_LOOKED_AT = 100


def find_logs(patterns: Sequence[str]) -> list[Location]:
    """What `patterns` name: files, folders (and folders of a date in them), globs, each of them also behind s3://, or
    `sample:NAME` for a trace carried with the package.

    Sorted, each once. UserError names the first pattern that finds nothing.
    """
    local: dict[Path, None] = {}
    remote: dict[S3Object, None] = {}
    for pattern in patterns:
        found = matches(pattern)
        if not found:
            raise UserError(pattern, "no traffic log there", f"give files, folders or globs of {', '.join(SUFFIXES)}")
        local |= dict.fromkeys(each.resolve() for each in found if isinstance(each, Path))
        remote |= dict.fromkeys(each for each in found if isinstance(each, S3Object))
    return [*sorted(local), *sorted(remote)]


def matches(pattern: str) -> Sequence[Location]:
    if pattern.startswith(SAMPLE):
        return [sample_path(pattern.removeprefix(SAMPLE))]
    if pattern.startswith(SCHEME):
        named = under(pattern)
        alone = len(named) == 1 and named[0][1].url == pattern
        return [each for below, each in named if alone or is_log(PurePosixPath(below))]
    path = Path(pattern).expanduser()
    if path.is_dir():
        below = ((file, PurePosixPath(file.relative_to(path).as_posix())) for file in path.rglob("*"))
        return [file for file, where in below if is_log(where) and file.is_file()]
    if path.is_file():
        return [path]
    return [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]


def is_log(where: PurePosixPath) -> bool:
    """Whether a file of a folder counts: by its ending, and below folders that name a partition (date=..., 2026/11/30)."""
    named = bool(ENDINGS.search(where.name)) and not where.name.startswith((".", "_"))
    return named and all(PARTITION.fullmatch(part) for part in where.parts[:-1])


def label(location: Location) -> str:
    """The file's name, behind those of the partitions that it lies in."""
    parts = PurePosixPath(str(location).removeprefix(SCHEME)).parts
    start = len(parts) - 1
    while start > 1 and PARTITION.fullmatch(parts[start - 1]):
        start -= 1
    return "/".join(parts[start:])


def sample_path(name: str) -> Path:
    folder = Path(str(resources.files("tideforge.data") / "samples"))
    path = folder / f"{name}.parquet"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.parquet")))
        raise UserError(SAMPLE + name, "no such sample", f"samples are: {known}")
    return path


@dataclasses.dataclass(frozen=True)
class Head:
    """What a file is, by its beginning. `names`: columns of CSV, top-level names of JSON; Parquet's are in its schema."""

    kind: Literal["parquet", "csv", "json"]
    names: tuple[str, ...] = ()
    layout: Literal["lines", "array", "unstructured"] = "lines"  # of JSON
    marked: bool = False  # begins with a mark of byte order
    json_below: tuple[str, ...] = ()  # names in the JSON lines that follow a first line that is none


def printable(name: str) -> str:
    """A name out of a file for a message of one line."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in name)


def look(location: Location) -> Head:
    head = first_bytes(location, HEAD_BYTES)
    if head.startswith(PARQUET_MAGIC):
        return Head("parquet")
    if head.strip() and ".parquet" in location.name:
        raise UserError(str(location), "is not Parquet (its first bytes are wrong)", "write the file again")
    return look_text(location, head)


def look_text(location: Location, head: bytes) -> Head:
    text = head.decode("utf-8", errors="replace")
    marked = text.startswith("\ufeff")
    text = text.lstrip("\ufeff").lstrip()
    lines = [line for line in text.splitlines() if line.strip()][:LINES_LOOKED_AT]
    if not lines:
        raise UserError(str(location), "is empty", "remove it from the logs or write it again")
    names = tuple(dict.fromkeys(name for line in lines for name in keys(line)))
    if text.startswith("["):
        return Head("json", keys(text.partition("{")[1] + text.partition("{")[2]), "array", marked)
    if not text.startswith("{"):
        return Head("csv", header(lines[0]), marked=marked, json_below=names)
    if len(lines) > 1 and not keys(lines[0], whole=True) and (document := keys(text) or first_key(text, lines[0])):
        return Head("json", document, "unstructured", marked)
    if not names:
        raise UserError(f"{location}: line 1", "is not a JSON object", "write one JSON object a line")
    return Head("json", names, "lines", marked)


def header(line: str) -> tuple[str, ...]:
    try:
        return tuple(name.strip() for name in next(csv.reader([line]), []))
    except csv.Error:
        return ()


def keys(text: str, whole: bool = False) -> tuple[str, ...]:
    """Names of the JSON object that `text` begins with (or, `whole`, is); none where it does not."""
    text = text.strip()
    try:
        value: Any
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(value) if isinstance(value, dict) and (not whole or end == len(text)) else ()


def first_key(text: str, line: str) -> tuple[str, ...]:
    """Of a document over several lines that is longer than the head."""
    found = re.match(r'\{\s*"([^"\\]+)"\s*:', text)
    return (found[1],) if found and line.rstrip().endswith(("{", "[", ",", ":")) else ()
