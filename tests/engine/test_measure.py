from __future__ import annotations

import math
import random

import pytest

from tideforge.data.workload import RequestShape
from tideforge.engine import measure
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Sampled
from tideforge.errors import CandidateError


class Counting:
    """Answers each row with a running number and remembers how many rows it saw."""

    def __init__(self) -> None:
        self.steps = 0

    def execute(self, step):
        self.steps += 1
        return [Sampled([self.steps] * len(step.request_ids))]

    def halt(self):
        pass


def test_brief_requests_end_by_halves() -> None:
    found = [shape.output_tokens for shape in measure.brief([RequestShape(5, 40)] * 8 + [RequestShape(5, 3)])]
    assert found == [2, 3, 4, 4, 5, 5, 5, 5, 3]


def side(name: str = "f") -> measure.Side:
    return measure.Side.of(
        name, EngineCore(Limits(max_num_seqs=4, max_num_batched_tokens=32), BlockPool(64, 4)), Counting()
    )


SHAPES = [RequestShape(5, 3), RequestShape(7, 4), RequestShape(6, 2)]
PROMPTS = measure.draw_prompts(SHAPES, range(100), secret=1)


def test_a_block_holds_every_answer_with_growing_times():
    one = side()
    block = measure.run_block(one.core, "f", SHAPES, PROMPTS, users=2)
    assert [len(answer.tokens) for answer in block.answers] == [3, 4, 2]
    assert all(list(a.times_s) == sorted(a.times_s) and a.times_s[-1] <= block.seconds for a in block.answers)
    assert block.output_tps == pytest.approx(9 / block.seconds)


def test_prompts_are_spans_of_the_corpus_and_depend_on_the_secret():
    assert [len(p) for p in PROMPTS] == [5, 7, 6]
    assert all(list(p) == list(range(p[0], p[0] + len(p))) for p in PROMPTS)
    assert measure.draw_prompts(SHAPES, range(100), 2) != PROMPTS == measure.draw_prompts(SHAPES, range(100), 1)
    with pytest.raises(ValueError, match="shorter"):
        measure.draw_prompts(SHAPES, range(5), 1)


def test_lockstep_turns_the_order_round_and_gives_one_pair_a_step():
    a, b = side("a"), side("b")
    block_a, block_b, pairs = measure.lockstep(a, b, SHAPES, PROMPTS)
    assert len(pairs) == a.core._executors["a"].steps == b.core._executors["b"].steps
    assert block_a.seconds == pytest.approx(sum(x for x, _ in pairs)) and block_b.seconds == pytest.approx(
        sum(y for _, y in pairs)
    )


def test_the_interval_of_equal_arms_covers_one_as_often_as_it_says():
    rng = random.Random(5)
    covered = 0
    for _ in range(400):
        found = measure.interval([math.exp(rng.gauss(0, 0.05)) for _ in range(8)])
        covered += found.low <= 1 <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_the_ratio_of_steps_covers_the_truth():
    rng = random.Random(6)
    covered = 0
    for _ in range(400):
        pairs = [(1.3 * (1 + rng.gauss(0, 0.05)), 1 + rng.gauss(0, 0.05)) for _ in range(12)]
        found = measure.ratio_of_steps(pairs)
        covered += found.low <= 1.3 <= found.high
    assert 0.91 <= covered / 400 <= 0.99


def test_one_pair_has_no_interval():
    assert measure.interval([1.5]).low == 0 and measure.ratio_of_steps([(2.0, 1.0)]).high == math.inf


def test_p90_of_speed_is_the_speed_that_nine_in_ten_reach():
    answers = tuple(measure.Answer((1,), tuple(range(11)), tuple(i / rate for i in range(11))) for rate in range(1, 12))
    median, p90 = measure.user_tps([measure.Block(1.0, answers)])
    assert median == pytest.approx(6) and p90 == pytest.approx(2)


def test_what_equal_workers_differ_by_widens_an_interval():
    found = measure.Interval(1.02, 1.015, 1.025, 10)
    assert measure.with_noise_floor(found, ()) == found
    wide = measure.with_noise_floor(found, (0.007, -0.007, 0.007, -0.007, 0.007, -0.007, 0.007, -0.007))
    floor = 2.998 * 0.007 * (8 / 7) ** 0.5 * (9 / 8) ** 0.5 * 1.02  # Student's prediction interval, one-sided 99 %
    assert wide.low == pytest.approx(1.02 - (0.005**2 + floor**2) ** 0.5) and wide.low < 1
    assert wide.high == pytest.approx(1.02 + (0.005**2 + floor**2) ** 0.5)
    assert wide.ratio == pytest.approx(1.02) and wide.pairs == 10


def test_beside_another_worker_of_the_incumbent_no_offset_is_known() -> None:
    found = measure.Interval(1.02, 1.015, 1.025, 10)
    assert measure.between_fresh_workers(found, ()) == found
    wide = measure.between_fresh_workers(found, [0.011 + sign * 0.007 for sign in (1, -1) * 4])
    floor = 2.998 * 0.007 * (8 / 7) ** 0.5 * 2**0.5 * 1.02
    assert wide.ratio == 1.02 and wide.low == pytest.approx(1.02 - (0.005**2 + floor**2) ** 0.5)


@pytest.mark.parametrize("offset", [0.0, 0.011, -0.011])
def test_of_equal_workers_few_claim_a_win(offset):
    """Also where the incumbent's worker is lastingly off, which every trial beside it shares."""
    rng = random.Random(3)
    wins = 0
    for _ in range(300):
        noise = [rng.gauss(offset, 0.0075) for _ in range(8)]
        lasting = rng.gauss(offset, 0.0075)
        pairs = [(1.0, math.exp(-lasting - rng.gauss(0, 0.01))) for _ in range(10)]
        wins += measure.with_noise_floor(measure.ratio_of_steps(pairs), noise).low > 1
    assert wins <= 9


def test_a_side_whose_every_answer_dawdles_hangs() -> None:
    measure._require_progress(0.01, 1.9)
    measure._require_progress(5.0, 99.0)
    for a, b in ((0.01, 2.1), (5.0, 101.0)):
        with pytest.raises(CandidateError, match="for what took the incumbent") as caught:
            measure._require_progress(a, b)
        assert caught.value.outcome == "hung"
