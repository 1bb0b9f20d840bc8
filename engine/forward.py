"""A forward as files: the source of one forward pass, `knobs.json`, and `packing.json` where it keeps weights of its own. Its id is
the SHA-256 over all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tideforge.data.files import full_disk_named
from tideforge.errors import CandidateError

ENTRY = "forward.py"
KNOBS = "knobs.json"
PACKING = "packing.json"
MAX_BYTES = 1 << 20
MAX_FILES = 200
MAX_NAME = 100
MODELS = Path(__file__).resolve().parent / "models"


@dataclasses.dataclass(frozen=True)
class Forward:
    """`files` maps relative POSIX names to text, `knobs.json` included when there are knobs."""

    files: Mapping[str, str]

    def __post_init__(self) -> None:
        if ENTRY not in self.files:
            raise CandidateError("refused", f"{ENTRY} is missing: a forward defines build(ctx) in {ENTRY}")
        for name in self.files:
            path = PurePosixPath(name)
            if (
                path.is_absolute()
                or ".." in path.parts
                or path.suffix not in (".py", ".json")
                or not name.isprintable()
            ):
                raise CandidateError("refused", f"{name!r}: only relative .py and .json files belong to a forward")
        folders = {str(parent) for name in self.files for parent in PurePosixPath(name).parents}
        if len(self.files) > MAX_FILES or max(map(len, self.files)) > MAX_NAME or folders & set(self.files):
            raise CandidateError(
                "refused", f"at most {MAX_FILES} files with names of {MAX_NAME} letters, none of them also a folder"
            )
        if sum(len(text.encode()) for text in self.files.values()) > MAX_BYTES:
            raise CandidateError("refused", f"a forward is at most {MAX_BYTES} bytes of source")
        _ = self.packing

    @property
    def id(self) -> str:
        """SHA-256, hex, over every file's name and bytes, length-prefixed so that no two bundles collide."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            for part in (name.encode(), self.files[name].encode()):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    @property
    def knobs(self) -> dict[str, Any]:
        """Engine settings that this forward was measured with (threads, dtype, batch limits)."""
        try:
            knobs = json.loads(self.files.get(KNOBS, "{}"))
        except (ValueError, RecursionError) as error:
            raise CandidateError("refused", f"{KNOBS} is not JSON ({error})") from None
        if not isinstance(knobs, dict):
            raise CandidateError("refused", f"{KNOBS} is not an object")
        return knobs

    @property
    def packing(self) -> int:
        """Bytes that it says it keeps on its device beside what it was given, weights in another layout above all; 0 without the file."""
        try:
            said = json.loads(self.files.get(PACKING, '{"bytes": 0}'))
        except (ValueError, RecursionError) as error:
            raise CandidateError("refused", f"{PACKING} is not JSON ({error})") from None
        if not isinstance(said, dict) or set(said) != {"bytes"}:
            raise CandidateError("refused", f'{PACKING} is {{"bytes": N}} and nothing else')
        if type(said["bytes"]) is not int or said["bytes"] < 0:
            raise CandidateError("refused", f"{PACKING}: bytes is a whole number, 0 or more")
        return int(said["bytes"])

    def with_packing(self, declared: int) -> Forward:
        return self.with_file(PACKING, json.dumps({"bytes": declared}) + "\n") if declared else self

    def with_file(self, name: str, text: str) -> Forward:
        return Forward({**self.files, name: text})

    @classmethod
    def load(cls, folder: Path) -> Forward:
        """The .py and .json files of a folder. CandidateError for one that is no plain file or leads out of the folder,
        except to this package's own models; OSError or ValueError for one that cannot be read as text."""
        paths = sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".json") and "__pycache__" not in p.parts)
        roots = (folder.resolve(), MODELS)
        return cls({p.relative_to(folder).as_posix(): _text(p, roots) for p in paths})

    def _is(self, folder: Path) -> bool:
        """Whether it holds these files and no other, what an interpreter keeps beside them left out."""
        paths = {
            path.relative_to(folder): path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"
        }
        try:
            return {name.as_posix(): path.read_text() for name, path in paths.items()} == dict(self.files)
        except (OSError, ValueError):
            return False

    def save(self, root: Path) -> Path:
        """Writes the files under `root/<id>/` (Triton needs real files) and returns that folder. Atomic.

        A folder whose files are others by now is replaced: whoever has the user's rights can write there.
        """
        target = root / self.id
        if target.exists():
            if self._is(target):
                return target
            shutil.rmtree(target, ignore_errors=True)
        with full_disk_named(root):
            root.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=root))
            try:
                self._write(staging)
                with contextlib.suppress(OSError):  # another process saved the same bytes first
                    os.rename(staging, target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return target

    def _write(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def _text(path: Path, roots: Collection[Path]) -> str:
    try:
        real = path.resolve(strict=True)
    except (FileNotFoundError, RuntimeError):  # RuntimeError: a loop of links
        said = f"{path.name} links to {os.readlink(path)}, which is not there; copy a folder of links with cp -rL"
        raise CandidateError("refused", said) from None
    if not any(real.is_relative_to(root) for root in roots):
        raise CandidateError("refused", f"{path.name} leads out of its folder, to {real}; copy what it needs into it")
    if not real.is_file():  # reading a FIFO would wait for a writer
        raise CandidateError("refused", f"{path.name} is no plain file")
    with real.open() as file:
        return file.read(MAX_BYTES + 1)  # whatever is longer is refused
