"""The forwards of the red team: one file each, what it says of itself, and the candidate that is made of it."""

from __future__ import annotations

import ast
import dataclasses
import zlib
from pathlib import Path

from tideforge.engine.forward import ENTRY, KNOBS, Forward
from tideforge.tasks.search.offline.recipes import cook, fitting
from tideforge.tasks.search.offline.rules import RULES

from .renamer import constants, renamed

HERE = Path(__file__).parent
FOLDERS = {
    "cheats": HERE / "cheats",
    "honest": HERE / "honest",
    "unseen-cheats": HERE / "unseen" / "cheats",
    "unseen-honest": HERE / "unseen" / "honest",
}
BASE = "base.py"
DOUBLE = {"mla": "deepseek"}  # of an architecture that a forward names otherwise


@dataclasses.dataclass(frozen=True)
class Entry:
    """One forward. `source` is the file's text; "" for one that the offline agent's rewrites make of the raw forward."""

    name: str
    set: str
    source: str
    architecture: str = "llama"
    dtype: str = "float32"
    gpu: bool = False  # only makes sense there
    cpu: bool = False  # asks the host for lengths or values, which a captured graph cannot
    contained: bool = False  # a cheat that has failed when it gains nothing and harms nobody
    recipe: tuple[str, ...] = ()
    packing: int = 0  # bytes that it declares

    @property
    def kind(self) -> tuple[str, str]:
        """Of the ring that it is tried in."""
        return self.architecture, self.dtype

    @property
    def honest(self) -> bool:
        return self.set.endswith("honest")

    def forward(self, incumbent: Forward, plain: Forward, seed: int | None, weights_bytes: int = 0) -> Forward:
        """The candidate: names changed unless `seed` is None, the raw forward beside it as base.py. `weights_bytes`: of its model."""
        if self.recipe:
            cooked, _ = cook(RULES, plain, self.recipe, weights_bytes)
            return cooked.with_file(KNOBS, incumbent.files[KNOBS])
        text = self.source if seed is None else renamed(self.source, seed + zlib.crc32(self.name.encode()) % 1000)
        return Forward({**incumbent.files, BASE: incumbent.files[ENTRY], ENTRY: text}).with_packing(self.packing)

    @property
    def what(self) -> str:
        return (
            (ast.get_docstring(ast.parse(self.source)) or "").split("\n")[0] if self.source else "+".join(self.recipe)
        )


def entries(sets: tuple[str, ...]) -> list[Entry]:
    found = [read(path, name) for name in sets for path in sorted(FOLDERS[name].glob("*.py"))]
    return found


def read(path: Path, of: str) -> Entry:
    text = path.read_text()
    said = constants(text)
    architecture = str(said.get("ARCHITECTURE", "llama"))
    return Entry(
        path.stem, of, text, DOUBLE.get(architecture, architecture), str(said.get("DTYPE", "float32")),
        bool(said.get("GPU", False)), bool(said.get("CPU", False)),
        bool(said.get("CONTAINED", False)), packing=int(str(said.get("PACKING", 0))),
    )  # fmt: skip


def winners(plain: Forward, architecture: str) -> list[Entry]:
    """What the offline agent makes of the raw forward: of each group of rewrites that fire the last, together; for the plainest
    architecture each by itself, too."""
    rules = fitting(RULES, plain)
    grouped = {rule.group or rule.name: rule.name for rule in rules}
    recipes = {"all": tuple(grouped.values())}
    if architecture == "llama":
        recipes |= {rule.name: (rule.name,) for rule in rules}
    return [
        Entry(f"offline-{name}-{architecture}", "honest", "", architecture, recipe=recipe)
        for name, recipe in recipes.items()
    ]


def fits(entry: Entry, device: str) -> bool:
    return not (entry.gpu if device == "cpu" else entry.cpu)
