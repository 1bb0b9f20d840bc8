"""Every cheat is caught and every honest forward passes; what renames them leaves them what they were."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tideforge.engine.forward import Forward
from tideforge.engine.measure import Interval

from .renamer import constants, renamed
from .ring import MODELS, REPLAYS, Tried
from .roster import FOLDERS, entries
from .runner import judged
from .seconds import NO_SCORE, Replay, scores

ROOT = Path(__file__).parents[2]
KNOWN = tuple(entries(("cheats", "honest")))
HANDFUL = (
    "last_layer_skipped",
    "own_cache_instead_of_pages",
    "weights_edited_in_place",
    "weights_in_bf16",
    "forked_twin",
)
GOOD = "split_k"


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the last line as JSON, and all that was printed."""
    command = [sys.executable, "-m", "tests.redteam.runner", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_a_handful_is_told_apart() -> None:
    code, told, printed = run("--quick", "--exact", "--only", *HANDFUL, GOOD)
    assert (code, told["cheats"], told["caught"], told["honest"]) == (0, len(HANDFUL), len(HANDFUL), 1), printed
    assert told["wrong"] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_cheat_is_missed_and_no_honest_forward_is_rejected() -> None:
    code, told, printed = run()
    assert (told["missed"], told["falsely_rejected"], told["wrong"]) == (0, 0, []), printed
    assert told["unseen"]["wrong"] == [], printed
    assert told["implausible"] == [], "a cheat that fails a plain output check tests nothing"
    assert told["cheats"] >= 45 and told["honest"] >= 15 and code == 0, printed


# --- how a verdict is judged

QUIET = Tried(True, "passed", "", {}, Interval(1.0, 0.9, 1.1, 9), Interval(1.0, 0.95, 1.05, 9), (), 1.0)


def entry(**changes: Any) -> Any:
    return dataclasses.replace(KNOWN[0], **{"set": "cheats", "contained": False, **changes})


def tried(**changes: Any) -> Tried:
    return dataclasses.replace(QUIET, **changes)


@pytest.mark.parametrize(
    ("of", "what", "ok", "by"),
    [
        ({}, {}, False, "MISSED"),
        ({}, {"outcome": "wrong"}, True, "outcome wrong"),
        ({}, {"failed": {"quality": "KL"}}, True, "gate quality"),
        ({"contained": True}, {}, True, "no gain"),
        ({"contained": True}, {"work": Interval(1.5, 1.2, 1.8, 9)}, False, "MISSED"),
        ({"contained": True}, {"wall": Interval(1.5, 1.2, 1.8, 9)}, False, "MISSED"),
        ({"contained": True}, {"harmed": ("check.py",)}, False, "MISSED"),
        ({"contained": True}, {"harmed": ("check.py",), "outcome": "wrong"}, False, "outcome wrong"),
        ({"contained": True}, {"wall": NO_SCORE, "work": NO_SCORE}, False, "MISSED"),
        ({"set": "honest"}, {}, True, "passed"),
        ({"set": "honest"}, {"failed": {"quality": "KL"}}, False, "gate quality"),
        ({"set": "unseen-honest"}, {"outcome": "wrong"}, False, "outcome wrong"),
    ],
)
def test_what_counts_as_caught(of: dict[str, Any], what: dict[str, Any], ok: bool, by: str) -> None:
    row = judged(entry(**of), tried(**what))
    assert (row.ok, row.by) == (ok, by)


def test_a_gain_is_seen_by_the_clock_and_by_work() -> None:
    rows = [Replay(tuple((1.5 + 0.01 * i, 1.0) for i in range(13)), (0.3 + 0.001 * i, 0.2)) for i in range(REPLAYS)]
    wall, work = scores(rows)
    assert wall.low > 1.4 and work.low > 1.4
    wall, work = scores(
        [Replay(((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)), (0.2, 0.2 + 0.01 * (i % 2))) for i in range(REPLAYS)]
    )
    assert wall.low <= 1 and work.low <= 1


# --- names


SAMPLE = '''"""What it is."""

import os.path
import torch.nn.functional as F
from base import build as honest_build

CONTAINED = True  # said to the runner
room = []


class Memo(dict):
    """Own class with a base: its attributes are others'."""

    def fill(self, items):
        self.update(items)
        self.mark = 1


class Wrap:
    calls, first = 0, None

    def __init__(self, inner, *, scale=2):
        """Keeps."""
        self.inner, self.steps, self.scale = inner, 0, scale

    def __call__(self, batch):
        self.steps += 1
        self.calls, self.first = self.calls + 1, self.first or batch
        return self.helper(batch) + self.steps

    def helper(self, value):
        try:
            return [part for part in self.inner(value)][-1] * self.scale
        except ValueError as error:
            raise RuntimeError(os.path.basename("a/b")) from error


def build(ctx):
    """Builds."""
    global room
    total = 0

    def count(value):
        nonlocal total
        total += value
        return [value, total]

    room = [count]
    memo = Memo()
    memo.fill({"a": 1})
    return Wrap(count, scale=3), lambda: (total, len(room), memo.mark, Wrap.calls, honest_build(ctx), F.relu)
'''


def ran(text: str) -> list[Any]:
    base = types.ModuleType("base")
    base.build = lambda ctx: ("plain", ctx)  # type: ignore[attr-defined]
    before = sys.modules.get("base")
    sys.modules["base"] = base
    try:
        space: dict[str, Any] = {"__name__": "forward"}
        exec(compile(text, "forward.py", "exec"), space)
        wrap, told = space["build"]("ctx")
        return [wrap(2), wrap(5), told()]
    finally:
        del sys.modules["base"]
        if before is not None:
            sys.modules["base"] = before


def test_a_renamed_program_does_the_same() -> None:
    text = renamed(SAMPLE, seed=4)
    assert ran(text) == ran(SAMPLE)
    assert text == renamed(SAMPLE, seed=4) != renamed(SAMPLE, seed=5)
    for word in (
        "What it is",
        "said to",
        "Keeps",
        "Memo",
        "Wrap",
        "helper",
        "steps",
        "honest_build",
        "room",
        "CONTAINED",
        "count",
    ):
        assert word not in text
    assert "scale=3" in text and "mark" in text and "def build(" in text


@pytest.mark.parametrize("one", KNOWN, ids=lambda one: f"{one.set}-{one.name}")
def test_each_forward_says_what_it_is_and_survives_new_names(one: Any) -> None:
    assert len(one.what) > 20
    text = renamed(one.source, seed=1)
    tree = ast.parse(text)
    assert any(isinstance(node, ast.FunctionDef) and node.name == "build" for node in tree.body)
    assert not any(
        ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )
    assert one.architecture in MODELS and (one.gpu or "GPU" not in constants(one.source))


def test_what_a_file_says_that_it_keeps_is_what_its_candidate_declares() -> None:
    plain = Forward({"forward.py": "", "knobs.json": "{}"})
    said = {one.name: one.forward(plain, plain, 0).packing for one in entries(("cheats", "honest", "unseen-honest"))}
    assert said["packed_and_declared"] == 101_000_000 and said["declares_little_and_packs_much"] == 1_000_000
    assert said["packs_undeclared"] == said["plain"] == 0 < said["packed_weights"]


def test_there_are_enough_of_them() -> None:
    assert sum(one.set == "cheats" for one in KNOWN) >= 45 and sum(one.set == "honest" for one in KNOWN) >= 15
    assert set(FOLDERS) == {"cheats", "honest", "unseen-cheats", "unseen-honest"}
