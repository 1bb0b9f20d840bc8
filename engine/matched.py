"""A matched filter: does a candidate make the very errors that a cheaper arithmetic would make? numpy only.

Let d be what the cheaper arithmetic does to the reference's logits, and e what the candidate does to them; both without their
mean a row, which no probability sees. The candidate's share of d on one row is <e, d> / <d, d>: 1 if it does just that, about
0 if its errors come from elsewhere. The median over rows is taken, not the mean: where an expert is chosen by a hair, noise
and cheaper arithmetic alike jump to its rival, and such a row says nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
OF_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, of normal readings
HALF = 0.5  # between what an honest forward shows (0) and a whole cheat (1): errors of both kinds are then equal


def centred(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - logits.mean(axis=-1, keepdims=True, dtype=np.float64).astype(logits.dtype))


def shares(errors: np.ndarray, cheaper: np.ndarray) -> np.ndarray:
    """<e, d> / <d, d> a row; both [N, V] and centred. A row where the cheaper arithmetic changes nothing is left out."""
    energy = np.einsum("nv,nv->n", cheaper, cheaper, dtype=np.float64)
    there = energy > 0
    return np.asarray(np.einsum("nv,nv->n", errors, cheaper, dtype=np.float64)[there] / energy[there])


@dataclasses.dataclass(frozen=True)
class Reading:
    """Of one cheaper arithmetic: the candidate's share, and what honest orders' rows say of a share's noise."""

    share: float
    honest: float  # the orders' own share
    error: float  # standard error of a share on so many rows
    rows: int

    @property
    def deviations(self) -> float:
        """How many standard errors the candidate's share lies above the honest ones'."""
        return (
            (self.share - self.honest) / self.error if self.error > 0 else math.inf * np.sign(self.share - self.honest)
        )

    def bound(self, deviations: float) -> float:
        """The share that an honest forward stays below."""
        return self.honest + deviations * self.error

    def rows_needed(self, deviations: float) -> int:
        """So that half of a whole cheat's error would show."""
        return math.ceil(self.rows * (deviations * self.error / HALF) ** 2)


def reading(errors: np.ndarray, orders: Sequence[np.ndarray], cheaper: np.ndarray) -> Reading | None:
    """All [N, V] and centred. None where the cheaper arithmetic changes nothing."""
    mine = shares(errors, cheaper)
    if not mine.size:
        return None
    honest = np.concatenate([shares(order, cheaper) for order in orders])
    middle = float(np.median(honest))
    spread = TO_SIGMA * float(np.median(np.abs(honest - middle)))
    return Reading(float(np.median(mine)), middle, OF_MEDIAN * spread / math.sqrt(mine.size), mine.size)
