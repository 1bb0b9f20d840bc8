"""Which files a list of names means, and what kind of file each is, by looking at its first bytes."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tideforge.errors import UserError

SUFFIXES = (".parquet", ".csv", ".jsonl")
SAMPLE = "sample:"
PARQUET_MAGIC = b"PAR1"


def find_logs(patterns: Sequence[str]) -> list[Path]:
    """Files that `patterns` name: files, folders, globs, or `sample:NAME` for a trace carried with the package.

    Sorted, each once. UserError names the first pattern that finds nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = matches(pattern)
        if not paths:
            raise UserError(pattern, "no traffic log there", f"give files, folders or globs of {', '.join(SUFFIXES)}")
        found |= dict.fromkeys(path.resolve() for path in paths)
    return sorted(found)


def matches(pattern: str) -> list[Path]:
    if pattern.startswith(SAMPLE):
        return [sample_path(pattern.removeprefix(SAMPLE))]
    path = Path(pattern).expanduser()
    if path.is_dir():
        return [file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith(".")]
    if path.is_file():
        return [path]
    return [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]


def sample_path(name: str) -> Path:
    folder = Path(str(resources.files("tideforge.data") / "samples"))
    path = folder / f"{name}.parquet"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.parquet")))
        raise UserError(SAMPLE + name, "no such sample", f"samples are: {known}")
    return path


def look(path: Path) -> tuple[str, list[str]]:
    """(kind, column names) of a CSV or JSON-lines file; ("parquet", []) for Parquet, whose schema others read."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 20)
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", "give a readable file") from None
    if not head:
        raise UserError(str(path), "is empty", "remove it from the logs or write it again")
    if head.startswith(PARQUET_MAGIC):
        return "parquet", []
    if path.suffix == ".parquet":
        raise UserError(str(path), "is not Parquet (its first bytes are wrong)", "write the file again")
    return look_text(path, head)


def look_text(path: Path, head: bytes) -> tuple[str, list[str]]:
    lines = head.decode("utf-8", errors="replace").lstrip("\ufeff").splitlines()
    first = next((line for line in lines if line.strip()), "")
    if not first.lstrip().startswith("{"):
        return "csv", [name.strip() for name in next(csv.reader([first]), [])]
    try:
        return "jsonl", list(json.loads(first))
    except ValueError:
        raise UserError(f"{path}: line 1", "is not a JSON object", "write one JSON object a line") from None
