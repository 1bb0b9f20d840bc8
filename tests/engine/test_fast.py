"""The fast tier sees what layers cost and whether they are right, and blames nobody for the incumbent's end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.config import Settings
from tideforge.engine.depths import Reading, depths_of
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.evaluate import Bench
from tideforge.engine.events import read_events
from tideforge.engine.fast import FastTier, Timed, figures
from tideforge.engine.forward import Forward
from tideforge.engine.measure import Answer, Block
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.outlive import INCUMBENT_RETRIES
from tideforge.engine.prepared import Spent
from tideforge.engine.service_config import ServiceConfig
from tideforge.errors import CandidateError, IncumbentLost

LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"


@pytest.fixture(scope="module")
def bench(tmp_path_factory, end_keeper):
    model, state = tiny_llama(tmp_path_factory.mktemp("model"), layers=4), tmp_path_factory.mktemp("s")
    end_keeper(state)
    shapes = tuple(RequestShape(6 + i, 6) for i in range(4))
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    workload = Workload(users=4, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (state / "workload.json").write_text(workload.to_json())
    config = ServiceConfig(
        Settings(state=state, model=model, num_blocks=64), state, LLAMA, state / "workload.json", tune=False
    )
    with contextlib.closing(Bench(config)) as made:
        yield made


def submit(bench: Bench, old: str, new: str, tier: str = "fast") -> Trial:
    source = bench.incumbent.files["forward.py"]
    assert old in source
    forward = bench.incumbent.with_file("forward.py", source.replace(old, new, 1))
    return bench.evaluate(Trial("t", forward.id, tier, "test", time.time()), forward)


@pytest.mark.timeout(120)
def test_a_slower_layer_shows_and_a_slower_head_does_not(bench) -> None:
    waste = "\n        for _ in range(4000):\n            x = x + 0"
    call = "slots: Tensor, spans: list[Span] | Batch) -> Tensor:\n        eps"
    slow = submit(bench, call, call.replace("\n        eps", waste + "\n        eps"))
    assert slow.outcome is Outcome.PASSED, slow.message
    assert slow.figures.ratio < 0.5 and slow.figures.ci_high < 1
    head = submit(
        bench,
        "        x = rms_norm(x[batch.logits_indices]",
        waste[1:].replace("4000", "100") + "\n        x = rms_norm(x[batch.logits_indices]",
    )
    assert head.outcome is Outcome.PASSED, head.message
    assert head.figures.ratio > 2 * slow.figures.ratio


@pytest.mark.timeout(120)
def test_a_wrong_layer_is_caught_at_whichever_depth_it_is(bench) -> None:
    skipped = submit(bench, "for index in ctx.layer_range]", "for index in list(ctx.layer_range)[:1]]")
    assert skipped.outcome is Outcome.WRONG
    wrong = submit(bench, "return x + self.mlp(", "return x + 1.5 * self.mlp(")
    assert wrong.outcome is Outcome.WRONG


@pytest.mark.timeout(120)
def test_the_slow_tier_is_as_before_and_another_is_refused(bench) -> None:
    assert submit(bench, "def build(", "# the same\ndef build(", tier="slow").outcome is Outcome.PASSED
    refused = submit(bench, "def build(", "# again\ndef build(", tier="warp")
    assert refused.outcome is Outcome.REFUSED and "slow, fast" in refused.message


def test_one_layer_is_too_few(bench) -> None:
    with pytest.raises(CandidateError, match="too few"):
        depths_of(dataclasses.replace(bench.lab.config, num_hidden_layers=1))


@pytest.mark.timeout(120)
def test_a_dead_incumbent_is_started_again_and_nobody_is_blamed(bench) -> None:
    tier = bench._fast_tier()
    tier.incumbent.kill()
    done = submit(bench, "def build(", "# after a death\ndef build(")
    assert done.outcome is Outcome.PASSED, done.message
    assert tier.incumbent.alive


@pytest.mark.timeout(120)
def test_parts_of_a_trial_are_accounted_for(bench) -> None:
    done = submit(bench, "def build(", "# in parts\ndef build(")
    assert done.outcome is Outcome.PASSED, done.message
    assert min(done.stage_s, done.check_s, done.swap_s, done.clock_s) > 0 and done.capture_s == 0
    assert done.figures.pairs >= 1 and done.figures.candidate_tps > 0


@pytest.mark.timeout(120)
def test_the_incumbent_against_itself_is_kept_in_the_nights_folder(bench) -> None:
    tier, path = bench._fast_tier(), bench.config.night / "fast-noise.json"
    assert json.loads(path.read_text()) == {"log_ratios": [], "depths": [1, 2]} and tier.noise == ()
    path.unlink()
    bench.config = dataclasses.replace(bench.config, noise_trials=2)
    noise = tier._measure_noise()
    assert len(noise) == 2 and all(abs(value) < 1 for value in noise)
    assert noise == tuple(json.loads(path.read_text())["log_ratios"])
    assert tier._measure_noise() != noise, "each start of the incumbent has an offset of its own"


@dataclasses.dataclass
class Fakes:
    """A tier whose workers are names, and which times what `ends` says: an error, or None for a good measurement."""

    tier: FastTier
    candidate: Any
    ends: list[CandidateError | None]
    warmed: list[str]

    def timed(self) -> Any:
        return self.tier._timed(self.candidate, Forward({"forward.py": ""}), Spent())


@pytest.fixture
def fakes(tmp_path, monkeypatch) -> Fakes:
    tier = object.__new__(FastTier)
    made = Fakes(tier, SimpleNamespace(alive=True, pid=8), [], [])
    tier.bench = object.__new__(Bench)
    tier.bench.config = SimpleNamespace(night=tmp_path)
    monkeypatch.setattr(tier.bench, "exclusive", contextlib.nullcontext)
    tier.lab = SimpleNamespace(release=lambda worker: None)
    tier.incumbent = SimpleNamespace(alive=True, pid=7)

    def time(*_: Any) -> Timed:
        if (error := made.ends.pop(0)) is None:
            return Timed()
        tier.incumbent.alive = "incumbent" not in error.message
        raise error

    monkeypatch.setattr(tier, "_time", time)
    monkeypatch.setattr(tier, "_warm", lambda worker, forward, spent: made.warmed.append("candidate"))
    monkeypatch.setattr(tier, "_start_incumbent", lambda: SimpleNamespace(alive=True, pid=7))
    return made


def death(whose: str) -> CandidateError:
    return CandidateError("crashed", f"the {whose}'s worker died of SIGKILL")


@pytest.mark.parametrize("deaths", range(INCUMBENT_RETRIES + 1))
def test_a_trial_outlives_the_incumbents_deaths(fakes, deaths, tmp_path) -> None:
    fakes.ends = [*[death("incumbent")] * deaths, None]
    assert fakes.timed() == Timed() and not fakes.ends
    assert [event["event"] for event in read_events(tmp_path)] == ["incumbent_died"] * deaths
    assert fakes.warmed == ["candidate"], "graphs are captured once"


def test_beyond_that_nobody_is_blamed(fakes) -> None:
    fakes.ends = [death("incumbent")] * 9
    with pytest.raises(IncumbentLost, match="nothing is known of the candidate"):
        fakes.timed()
    assert len(fakes.ends) == 9 - (INCUMBENT_RETRIES + 1)


def test_a_candidate_that_fails_is_blamed(fakes) -> None:
    fakes.ends = [CandidateError("wrong", "another token")]
    with pytest.raises(CandidateError, match="another token"):
        fakes.timed()
    fakes.ends, fakes.candidate.alive = [death("incumbent")], False
    with pytest.raises(CandidateError, match="died"):
        fakes.timed()


def test_the_incumbents_own_failure_at_a_depth_is_no_candidates(bench, monkeypatch) -> None:
    tier = bench._fast_tier()
    monkeypatch.setattr(tier, "_warm", lambda *_: (_ for _ in ()).throw(CandidateError("wrong", "another token")))
    workers = len(bench.lab._workers)
    with pytest.raises(IncumbentLost, match="does not run at"):
        tier._start_incumbent()
    assert len(bench.lab._workers) == workers, "its worker is let go"


def test_figures_are_of_the_layers_between_and_of_the_larger_depth() -> None:
    small, large = (Block(seconds, (Answer((1,), (2, 3), (0.1, 0.2)),)) for seconds in (0.5, 1.0))
    timed = Timed([Reading((0.1, 0.3), (0.1, 0.2))] * 6)
    timed.blocks[1], timed.blocks[3] = [(small, small)], [(large, large)]
    found = figures(timed, (), 3)
    assert found.ratio == pytest.approx(2.0) and found.pairs == 6 and found.candidate_tps == pytest.approx(2.0)
    wide = figures(timed, (0.01, -0.01) * 4, 3)
    assert wide.ratio == pytest.approx(found.ratio) and wide.ci_high - wide.ci_low > 0.1
