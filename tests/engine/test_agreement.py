"""Kendall's tau and the loss of a screen, against cases done by hand and the definition spelled out."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tideforge.engine import agreement as tiers
from tideforge.engine import measure
from tideforge.engine.agreement import Both, agreement, floor_of, loss

GRID = st.integers(80, 130).map(lambda hundredths: hundredths / 100)  # coarse, so that ties are common
MEASURED = st.lists(st.tuples(GRID, GRID), min_size=1, max_size=12)


def both(pairs: list[tuple[float, float]]) -> list[Both]:
    return [Both(str(index), fast, slow) for index, (fast, slow) in enumerate(pairs)]


def test_by_hand() -> None:
    """Of six pairs one is turned round: 1.10 and 1.12 on the slow tier."""
    found = agreement(both([(0.9, 0.95), (1.0, 1.0), (1.3, 1.1), (1.2, 1.12)]), floor=0.001)
    assert (found.pairs, found.counted, found.counted_share) == (6, 6, 1.0)
    assert found.tau == pytest.approx((5 - 1) / 6)
    assert found.loss == 0 and loss(both([(0.9, 0.95), (1.3, 1.1), (1.2, 1.12)]), 1) == pytest.approx(1.12 / 1.1 - 1)


def test_pairs_within_the_noise_do_not_count() -> None:
    close = both([(1.3, 1.1), (1.2, 1.12), (1.0, 1.0)])
    assert agreement(close, floor=0.03).tau == 1.0 and agreement(close, floor=0.03).counted == 2
    alone = agreement(close, floor=1.0)
    assert (alone.tau, alone.counted, alone.counted_share) == (None, 0, 0.0)
    single = agreement(close[:1], floor=0.0)
    assert (single.pairs, single.counted_share, single.tau, single.loss) == (0, 0.0, None, 0.0)


def test_a_tie_on_the_fast_tier_is_half_a_mistake_and_never_luck() -> None:
    tied = both([(1.2, 1.1), (1.2, 1.3)])
    assert agreement(tied, 0.01).tau == 0
    assert loss(tied, 1) == loss(tied[::-1], 1) == pytest.approx(1.3 / 1.1 - 1) and loss(tied, 2) == 0


@pytest.mark.parametrize(("measured", "top"), [([], 3), (both([(1.0, 1.0)]), 0)])
def test_nothing_to_judge_is_an_error(measured, top) -> None:
    with pytest.raises(ValueError, match="at least one"):
        agreement(measured, 0.0, top)


@given(MEASURED, st.sampled_from([0.0, 0.01, 0.05]))
def test_tau_is_the_definitions(pairs, floor) -> None:
    right = wrong = counted = 0
    for i, (fast, slow) in enumerate(pairs):
        for other_fast, other_slow in pairs[:i]:
            if abs(math.log(slow) - math.log(other_slow)) > floor + 1e-12:
                counted += 1
                right += (slow > other_slow and fast > other_fast) or (slow < other_slow and fast < other_fast)
                wrong += (slow > other_slow and fast < other_fast) or (slow < other_slow and fast > other_fast)
    found = agreement(both(pairs), floor + 1e-12)
    assert found.counted == counted
    assert found.tau is None if not counted else found.tau == pytest.approx((right - wrong) / counted)


@given(MEASURED, st.randoms(use_true_random=False))
def test_order_and_scale_do_not_matter_and_turning_round_turns_the_sign(pairs, rng) -> None:
    found = agreement(both(pairs), 0.005)
    mixed = list(pairs)
    rng.shuffle(mixed)
    assert agreement(both(mixed), 0.005) == found
    assert agreement(both([(fast**3, slow) for fast, slow in pairs]), 0.005).tau == found.tau
    turned = agreement(both([(1 / fast, slow) for fast, slow in pairs]), 0.005).tau
    assert turned == (None if found.tau is None else pytest.approx(-found.tau))
    perfect = agreement(both([(slow, slow) for _, slow in pairs]), 0.005)
    assert perfect.tau in (None, 1.0) and perfect.loss == 0


@given(MEASURED)
def test_more_places_lose_less(pairs) -> None:
    losses = [loss(both(pairs), top) for top in range(1, len(pairs) + 1)]
    assert losses == sorted(losses, reverse=True) and losses[-1] == 0 and min(losses) >= 0


def test_the_floor_is_the_one_that_widens_intervals() -> None:
    assert floor_of(()) == 0.0
    logs = (0.007, -0.007) * 4
    assert floor_of(logs) == pytest.approx(2.998 * 0.007 * (8 / 7) ** 0.5 * (9 / 8) ** 0.5)
    wide = measure.with_noise_floor(measure.Interval(1.0, 1.0, 1.0, 9), logs)
    assert floor_of(logs) == pytest.approx(wide.high - 1)


def test_of_honest_candidates_a_fast_tier_as_noisy_as_its_precision_agrees() -> None:
    """Thirty between 0.8 and 1.3, half-widths of 1 % on either tier: the goal of 0.9 is within reach of such a measurement."""
    rng, taus = random.Random(1), []
    for _ in range(50):
        truth = [0.8 + 0.5 * rng.random() for _ in range(30)]
        noisy = [(value * (1 + rng.gauss(0, 0.005)), value * (1 + rng.gauss(0, 0.005))) for value in truth]
        found = tiers.agreement(both(noisy), floor=0.02)
        assert found.tau is not None and found.loss < 0.02
        taus.append(found.tau)
    assert min(taus) > 0.9
