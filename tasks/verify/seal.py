"""Files that nobody may change while a candidate is verified, by their hashes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tideforge.data.files import sha256_file
from tideforge.engine import config as engine_config
from tideforge.tasks import store as tasks_store

OWN_CODE = tuple(Path(module.__file__ or "").parent for module in (engine_config, tasks_store))
NOT_CODE = ("__pycache__",)  # whatever an interpreter writes by itself


@dataclasses.dataclass(frozen=True)
class Seal:
    """Files and folders as they were: path -> SHA-256."""

    roots: tuple[Path, ...]
    hashes: Mapping[Path, str]

    @classmethod
    def of(cls, protected: Sequence[Path]) -> Seal:
        """The engine's and the tasks' own source is always among them."""
        roots = (*OWN_CODE, *protected)
        return cls(roots, dict(_hashes(roots)))

    def changes(self) -> list[str]:
        """A line for each file that is another one, is gone or was added."""
        now = dict(_hashes(self.roots))
        same = {path for path, sha in now.items() if self.hashes.get(path) == sha}
        return [f"{path} {self._how(path, now)}" for path in sorted({*now, *self.hashes} - same)]

    def _how(self, path: Path, now: Mapping[Path, str]) -> str:
        if path not in now:
            return "is gone"
        return f"was {self.hashes[path][:12]}, is {now[path][:12]}" if path in self.hashes else "was added"


def _hashes(roots: Iterable[Path]) -> Iterable[tuple[Path, str]]:
    for root in roots:
        files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
        yield from ((path, sha256_file(path)) for path in files if not set(NOT_CODE) & set(path.parts))
