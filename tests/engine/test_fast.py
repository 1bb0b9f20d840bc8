"""The fast tier sees what layers cost and whether they are right, at depths that hold whole periods of the pattern."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import fast
from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.evaluate import Bench
from tideforge.engine.measure import Answer, Block
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.service_config import ServiceConfig
from tideforge.errors import CandidateError

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
    waste = "\n        for _ in range(400):\n            x = x + 0"
    call = "slots: Tensor, spans: list[Span] | Batch) -> Tensor:\n        eps"
    slow = submit(bench, call, call.replace("\n        eps", waste + "\n        eps"))
    assert slow.outcome is Outcome.PASSED, slow.message
    assert slow.figures.ratio < 0.5 and slow.figures.ci_high < 1
    head = submit(
        bench,
        "        x = rms_norm(x[batch.logits_indices]",
        waste[1:] + "\n        x = rms_norm(x[batch.logits_indices]",
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


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [("dddd", (1, 3)), ("dd", (1, 2)), ("dsssss", (2, 4)), ("dsdsds", (2, 6)), ("dsds", (2, 4))],
)
def test_depths_hold_whole_periods(bench, kinds, expected) -> None:
    @dataclasses.dataclass(frozen=True)
    class Patterned(ModelConfig):
        def is_sparse(self, layer: int) -> bool:
            return kinds[layer] == "s"

    raw = {**vars(bench.lab.config), "num_hidden_layers": len(kinds)}
    assert fast.depths_of(Patterned(**raw)) == expected


def test_one_layer_is_too_few(bench) -> None:
    with pytest.raises(CandidateError, match="too few"):
        fast.depths_of(dataclasses.replace(bench.lab.config, num_hidden_layers=1))


def test_a_depth_that_costs_nothing_is_no_win() -> None:
    block = Block(1.0, (Answer((1,), (2, 3), (0.1, 0.2)),))
    with pytest.raises(CandidateError, match="larger depth"):
        fast.figures([(0.01, -0.02), (0.01, 0.01)], [(block, block)])


def test_the_ratio_is_of_the_layers_between() -> None:
    block = Block(1.0, (Answer((1,), (2, 3), (0.1, 0.2)),))
    found = fast.figures([(0.02, 0.01)] * 6, [(block, block)])
    assert found.ratio == pytest.approx(2.0) and found.pairs == 6
