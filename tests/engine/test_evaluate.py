"""Who is to blame when a trial ends early: the candidate for what its own worker did, nobody for the incumbent's death."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideforge.engine.evaluate import Bench
from tideforge.engine.events import read_events
from tideforge.engine.forward import Forward
from tideforge.engine.ladder import Ladder
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.outlive import INCUMBENT_RETRIES
from tideforge.errors import CandidateError, IncumbentLost

MEASURED: Any = ([("a block", "another")], [(2.0, 1.0)])


@dataclasses.dataclass
class Workers:
    """A bench whose workers are names, and which times what `ends` says: an error, or None for a good measurement."""

    bench: Bench
    candidate: Any
    ends: list[CandidateError | None]

    def timed(self) -> Any:
        return self.bench.outlive(self.candidate, lambda: self.bench.incumbent_worker, self.attempt)

    def attempt(self) -> Any:
        error, incumbent = self.ends.pop(0), self.bench.incumbent_worker
        incumbent.alive = error is None or "incumbent" not in error.message  # type: ignore[misc]
        if error is not None:
            raise error
        return MEASURED


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    bench = object.__new__(Bench)
    made = Workers(bench, SimpleNamespace(alive=True, pid=8, ward=SimpleNamespace(census=lambda: None)), [])
    bench.config = SimpleNamespace(night=tmp_path)  # type: ignore[assignment]
    bench.settings, bench.ladder = None, Ladder()  # type: ignore[assignment]
    bench.incumbent_worker = SimpleNamespace(alive=True, pid=7)  # type: ignore[assignment]
    return made


def death(whose: str) -> CandidateError:
    return CandidateError("crashed", f"the {whose}'s worker died of SIGKILL")


@pytest.mark.parametrize("deaths", range(INCUMBENT_RETRIES + 1))
def test_a_trial_outlives_the_incumbents_deaths(workers: Workers, deaths: int, tmp_path: Path) -> None:
    workers.ends = [*[death("incumbent")] * deaths, None]
    assert workers.timed() == MEASURED and not workers.ends
    assert [event["event"] for event in read_events(tmp_path)] == ["incumbent_died"] * deaths


def test_beyond_that_nobody_is_blamed(workers: Workers) -> None:
    workers.ends = [death("incumbent")] * 9
    with pytest.raises(IncumbentLost, match="nothing is known of the candidate"):
        workers.timed()
    assert len(workers.ends) == 9 - (INCUMBENT_RETRIES + 1)


def test_a_candidate_that_fails_after_the_incumbent_died_is_blamed(workers: Workers) -> None:
    workers.ends = [death("incumbent"), CandidateError("wrong", "another token")]
    with pytest.raises(CandidateError, match="another token"):
        workers.timed()
    workers.ends, workers.candidate.alive = [death("incumbent")], False
    with pytest.raises(CandidateError):
        workers.timed()


def test_a_trial_whose_incumbent_cannot_be_measured_says_so(workers: Workers) -> None:
    bench: Any = workers.bench
    bench.lab = SimpleNamespace(sandbox="none")
    bench.settings = SimpleNamespace(device="cpu")
    bench.staging = SimpleNamespace(stage=lambda prepared: None, release=lambda prepared: True)

    def lost(*_: Any) -> Any:
        raise IncumbentLost("the incumbent's worker died 4 times")

    bench._slow = SimpleNamespace(evaluate=lost)
    trial = Trial("000000-f", "f", "slow", "a", 0.0)
    forward = Forward({"forward.py": "def build(ctx):\n    return None\n", "knobs.json": "{}"})
    done = bench.evaluate(trial, forward)
    assert done.outcome is Outcome.NOT_MEASURED and done.figures is None and "incumbent" in done.message
    assert Trial.from_json(done.to_json()) == done
