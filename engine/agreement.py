"""What the fast tier's order of candidates is worth, judged by the slow tier's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from tideforge.engine import measure


@dataclasses.dataclass(frozen=True)
class Both:
    """A candidate's ratio to the incumbent on either tier."""

    name: str
    fast: float
    slow: float


@dataclasses.dataclass(frozen=True)
class Agreement:
    """`tau`: Kendall's, over the pairs that count, a tie on the fast tier being neither right nor wrong; None without such pairs.

    A pair counts when its slow ratios differ by more than the noise floor. `loss`: by how much the best slow ratio of all is above
    the best among the fast tier's `top`, as a share of the latter.
    """

    candidates: int
    counted: int  # pairs
    tau: float | None
    top: int
    loss: float

    @property
    def pairs(self) -> int:
        return self.candidates * (self.candidates - 1) // 2

    @property
    def counted_share(self) -> float:
        return self.counted / self.pairs if self.pairs else 0.0


def agreement(measured: Sequence[Both], floor: float, top: int = 3) -> Agreement:
    """`floor`: in log ratio, see floor_of. ValueError without candidates, or for a `top` below 1."""
    if not measured or top < 1:
        raise ValueError("an agreement needs a candidate, and a top of at least one")
    signs = [_sign(a, b) for a, b in itertools.combinations(measured, 2) if counts(a, b, floor)]
    tau = sum(signs) / len(signs) if signs else None
    return Agreement(len(measured), len(signs), tau, top, loss(measured, top))


def counts(a: Both, b: Both, floor: float) -> bool:
    """Whether the slow tier tells the two apart."""
    return abs(math.log(a.slow / b.slow)) > floor


def _sign(a: Both, b: Both) -> int:
    """1 where both tiers order the two alike, -1 where they do not, 0 for a tie."""
    slow, fast = a.slow - b.slow, a.fast - b.fast
    return (slow * fast > 0) - (slow * fast < 0)


def loss(measured: Sequence[Both], top: int) -> float:
    """Of promoting the fast tier's `top`; among equals on the fast tier the worse ones go first."""
    best = max(one.slow for one in measured)
    chosen = sorted(measured, key=lambda one: (-one.fast, one.slow))[:top]
    return best / max(one.slow for one in chosen) - 1


def floor_of(log_ratios: Sequence[float]) -> float:
    """The noise floor as it widens an interval around 1, from the incumbent's log ratios against itself; 0 without any."""
    return measure.noise_of(log_ratios)[1]
