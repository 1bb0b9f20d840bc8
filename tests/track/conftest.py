"""A night as it lies on disk: two finished candidates of which one passed, a verdict with pairs, forwards in the archive."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import open_night
from tideforge.tasks.store import Run

INCUMBENT = Forward({"forward.py": "def build(ctx):\n    return None\n"})
WINNER = Forward({"forward.py": "def build(ctx):\n    return ctx\n"})
BROKEN = Forward({"forward.py": "def build(ctx):\n    raise ValueError\n"})
PAIRS = [[100.0, 130.0], [110.0, 140.0], [90.0, 120.0]]


@dataclasses.dataclass(frozen=True)
class Made:
    run: Run
    endpoint: Endpoint


def endpoint_in(folder: Path, uri: str | None = None) -> Endpoint:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    return Endpoint.model_validate({**raw, "state": str(folder), "tracking_uri": uri})


def make_night(endpoint: Endpoint, run_id: str = "n1") -> Run:
    for forward in (INCUMBENT, WINNER, BROKEN):
        forward.save(endpoint.state / "forwards")
    run = open_night(endpoint, run_id, "test", "")
    figures = Figures(1.3, 1.2, 1.4, 8, 130.0, 100.0, 12.0, 9.0, 8.0)
    trials = [
        Trial("000000-a", WINNER.id, "slow", "offline-1", 10.0, Outcome.PASSED, "", figures, finished_at=20.0),
        Trial("000001-b", BROKEN.id, "slow", "offline-2", 11.0, Outcome.BUILD_ERROR, "ValueError", finished_at=25.0),
    ]
    outputs = {
        "trials": run.write_json("trials", [json.loads(trial.to_json()) for trial in trials]),
        "board": run.write_bytes("board", ".jsonl", b'{"post": 1}\n'),
    }
    extra = {"finalist": WINNER.id, "incumbent": INCUMBENT.id, "served": INCUMBENT.id}
    run.finish("search", {}, outputs, extra, started=9.0)
    run.finish("verify", {}, {"verdict": run.write_json("verdict", verdict())}, {"passed": True})
    return run


def verdict(passed: bool = True) -> dict[str, object]:
    gates = [{"name": "answers", "passed": True}, {"name": "isolation", "passed": passed}]
    figures = {"ratio": 1.3, "ci_low": 1.25, "ci_high": 1.35, "ttft_ms": 11.0, "tps_per_user_p50": 9.0}
    whole = {**figures, "tps_per_user_p90": 8.0, "pairs": PAIRS, "gates": gates, "forward": WINNER.id}
    return {**whole, "passed": passed}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    endpoint = endpoint_in(tmp_path / "s")
    return Made(make_night(endpoint), endpoint)


@pytest.fixture
def nights() -> SimpleNamespace:
    """The makers above, for tests that want an endpoint of their own."""
    return SimpleNamespace(endpoint_in=endpoint_in, make_night=make_night, WINNER=WINNER, INCUMBENT=INCUMBENT)
