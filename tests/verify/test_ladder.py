"""The cheap gates run on what a search would choose, in the worker that was timed; what fails one has no figures."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tideforge.engine.doubles import tiny_llama
from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import ENTRY
from tideforge.engine.gates import CHEAP, GATES
from tideforge.engine.lab import end_keeper
from tideforge.engine.ladder import SHARE, Ladder
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.engine.prepared import Prepared
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.slow import SlowTier
from tideforge.tasks import evidence

from .conftest import WORK, Settings

LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"
WON = Figures(1.3, 1.2, 1.4, 8, 130.0, 100.0, 9.0, 9.0, 8.0)
# Answers rightly from pages that no other forward could go on with.
SCALED = [
    ("index_copy_(0, slots, k)", "index_copy_(0, slots, 2.0 * k)"),
    ("attention(q, self.keys", "attention(0.5 * q, self.keys"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "workload.json").write_text(WORK.to_json())
    settings = Settings(folder / "s", tiny_llama(folder / "model"), num_blocks=64)
    config = ServiceConfig(settings, folder, LLAMA, folder / "workload.json", passes=1, trial_s=8, tune=False)
    with contextlib.closing(Bench(config)) as made:
        yield made
    end_keeper(settings.state)


def tried(bench: Bench, monkeypatch: pytest.MonkeyPatch, figures: Figures, changes: list[tuple[str, str]]) -> Trial:
    """A trial whose timing came out like `figures`, of the incumbent's source with these changes."""
    real = SlowTier.evaluate

    def evaluate(self: SlowTier, prepared: Prepared) -> Figures:
        real(self, prepared)
        return figures

    monkeypatch.setattr(SlowTier, "evaluate", evaluate)
    source = bench.incumbent.files[ENTRY]
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    forward = bench.incumbent.with_file(ENTRY, source)
    return bench.evaluate(Trial("t", forward.id, "slow", "test", time.time()), forward)


def test_a_winner_that_fails_a_gate_has_an_outcome_evidence_and_no_figures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = tried(bench, monkeypatch, WON, SCALED)
    assert trial.outcome is Outcome.FAILED_GATE and trial.figures is None and trial.gates_s > 0
    said = trial.message
    assert said.startswith("first_look: ") and "layer 0 keys, token" in said and "bound" in said, said
    assert Trial.from_json(trial.to_json()) == trial


def test_a_winner_that_passes_keeps_its_figures_and_tells_what_the_gates_took(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = tried(bench, monkeypatch, WON, [("def build", "# the same\ndef build")])
    assert trial.figures == WON and 0 < trial.gates_s < trial.device_s, trial.message
    assert trial.device_s == trial.check_s + trial.capture_s + trial.clock_s + trial.gates_s


def test_what_no_search_would_keep_is_not_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tried(bench, monkeypatch, dataclasses.replace(WON, ci_low=0.99), SCALED)
    assert trial.outcome is Outcome.PASSED and trial.gates_s == 0


def test_the_cheap_gates_are_gates() -> None:
    assert set(CHEAP) < set(GATES)


def test_the_share_is_of_the_slow_tiers_device_seconds() -> None:
    done = Trial(
        "a", "f", "slow", "", 1.0, Outcome.PASSED, figures=WON, check_s=1.0, clock_s=4.0, capture_s=1.0, gates_s=2.0
    )
    lost = Trial("b", "f", "slow", "", 1.0, Outcome.WRONG, check_s=2.0, stage_s=99.0)
    fast, waits = dataclasses.replace(done, tier="fast"), Trial("c", "f", "slow", "", 1.0)
    assert evidence.ladder_share([done, lost, fast, waits]) == 2.0 / 10.0
    assert evidence.ladder_share([waits]) is None


def test_a_would_be_finalist_always_climbs_and_others_as_far_as_the_share_allows() -> None:
    ladder = Ladder()

    def won(low: float, **seconds: float) -> Trial:
        figures = dataclasses.replace(WON, ci_low=low)
        return Trial("a", "f", "slow", "", 1.0, Outcome.PASSED, figures=figures, **seconds)  # type: ignore[arg-type]

    assert not ladder.due("slow", dataclasses.replace(WON, ci_low=1.0)) and not ladder.due("fast", WON)
    assert ladder.due("slow", WON)
    ladder.note(won(1.2, clock_s=4.0, gates_s=1.0))
    assert not ladder.due("slow", WON) and ladder.due("slow", dataclasses.replace(WON, ci_low=1.21))
    ladder.note(won(1.3, clock_s=1.0))
    assert ladder.due("slow", dataclasses.replace(WON, ci_low=1.25)), "what has not climbed is no measure"
    ladder.note(dataclasses.replace(won(1.0), outcome=Outcome.WRONG, figures=None, check_s=1 / SHARE))
    assert ladder.due("slow", WON), "the share is free again"
