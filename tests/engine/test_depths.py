"""Which depths are measured, and what the difference of their seconds is worth."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tideforge.engine import depths
from tideforge.engine.config import ModelConfig
from tideforge.engine.depths import HOPELESS, LEAST_BLOCKS, Reading, blocks_of, enough, ratio_of
from tideforge.engine.doubles import tiny_llama
from tideforge.errors import CandidateError


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ModelConfig:
    return ModelConfig.load(tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("dd", (1, 2)),
        ("dddd", (1, 2)),
        ("d" * 6, (1, 3)),
        ("d" * 32, (1, 5)),
        ("dsssss", (2, 3)),
        ("d" + "s" * 60, (2, 6)),
        ("dsdsds", (2, 4)),
        ("ds" * 12, (2, 10)),
    ],
)
def test_depths_hold_whole_periods(config, kinds, expected) -> None:
    @dataclasses.dataclass(frozen=True)
    class Patterned(ModelConfig):
        def is_sparse(self, layer: int) -> bool:
            return kinds[layer] == "s"

    raw = {**vars(config), "num_hidden_layers": len(kinds)}
    assert depths.depths_of(Patterned(**raw)) == expected


def reading(a: float, b: float) -> Reading:
    """1 s at the smaller depth; a and b seconds for the layers between."""
    return Reading((1.0, 1.0 + a), (1.0, 1.0 + b))


def test_steps_are_paired_across_the_depths() -> None:
    assert depths.readings([(1.0, 2.0)], [(3.0, 5.0)]) == [Reading((1.0, 3.0), (2.0, 5.0))]
    assert Reading((1.0, 3.0), (2.0, 5.0)).between == (2.0, 3.0)
    with pytest.raises(ValueError, match="shorter"):
        depths.readings([(1.0, 2.0)], [])


def test_short_steps_are_put_together_and_none_is_lost() -> None:
    steps = [Reading((0.01, 0.02), (0.01, 0.03))] * 5  # 0.03 s of the faster side
    assert [round(a, 3) for a, _ in blocks_of(steps, 0.05)] == [0.02, 0.03], "the last one alone is too short"
    assert len(blocks_of(steps, 0.03)) == 5 and len(blocks_of(steps, 9.0)) == 1
    for least_s in (0.0, 0.05, 0.07, 9.0):
        assert sum(b for _, b in blocks_of(steps, least_s)) == pytest.approx(0.1)
    assert blocks_of([]) == []


def test_the_ratio_is_of_the_layers_between() -> None:
    found = ratio_of(blocks_of([reading(0.2, 0.1)] * 6))
    assert found.ratio == pytest.approx(2.0) and found.pairs == 6


def test_a_depth_that_costs_nothing_is_no_win() -> None:
    for between in ([(0.01, -0.02), (0.01, 0.01)], [(0.0, 0.01), (0.0, 0.01)]):
        with pytest.raises(CandidateError, match="larger depth"):
            ratio_of(between)
    assert not enough([(0.01, -0.01)] * 9)


def test_a_trial_ends_when_it_is_precise_or_hopeless() -> None:
    precise = [(1.0, 1.0), (1.001, 1.0)] * 4
    assert enough(precise) and not enough(precise[: LEAST_BLOCKS - 1])
    rough = [(1.0, 1.0), (1.3, 1.0)] * 4
    assert not enough(rough)
    hopeless = [(0.5 * a, b) for a, b in rough]
    assert enough(hopeless) and ratio_of(hopeless).high < HOPELESS


def test_the_interval_covers_the_truth_under_noise_in_proportion_to_time() -> None:
    rng, covered = random.Random(4), 0
    for _ in range(400):
        noisy = [[seconds * (1 + rng.gauss(0, 0.01)) for seconds in (3.0, 7.5, 3.0, 6.0)] for _ in range(12)]
        found = ratio_of(blocks_of([Reading((a, b), (c, d)) for a, b, c, d in noisy]))
        covered += found.low <= 1.5 <= found.high
    assert 0.91 <= covered / 400 <= 0.99
