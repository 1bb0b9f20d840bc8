"""Logits and KV arithmetic: how far two forwards are apart, and how far reduction order alone takes them. numpy only.

Where the bounds come from. A forward at the endpoint's precision may sum in any order, so its logits are l + e, where l
are the reference's and e is rounding noise. `Reference.noise` measures e: the reference itself is run again with every
contraction (projections, scores, values, norms, router) summed in random blocks one after another, and with every
intermediate rounded to the precision. A greedy candidate emits i = argmax(l + e). For the reference's best token m,

    l_i + e_i >= l_m + e_m   =>   l_m - l_i <= e_i - e_m <= 2 max|e|.

So an emitted token may lie at most 2 max|e| below the reference's maximum. max|e| is a sample's maximum: SAFETY allows
for contexts and orders that the sample did not hold; limits.py takes less where less was measured. KL is quadratic in e
(Var_p(e) / 2 to second order), so its bound is SAFETY squared; the quality gate's are far tighter, since it measures noise on
the very tokens that it compares. Nothing here is a typed threshold but SAFETY.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Rounding error of a sum grows with the square root of the chain of additions that one term goes through. The measured
# orders add blocks of 16 to 128 terms: a chain of about a sixteenth of a contraction's length, where a kernel with a single
# accumulator has all of it. That is a factor of 4; the other 2 is for tokens and orders that the sample did not hold.
SAFETY = 8.0


@dataclasses.dataclass(frozen=True)
class Noise:
    """What reduction order and rounding at `dtype` did to the reference: the worst of `orders` runs on `rows` rows."""

    dtype: str
    rows: int
    orders: int
    logit_max: float  # max |e|, logits
    kl_mean: float  # nats, mean over rows; the worst order
    kl_max: float  # nats, worst row
    key_max: tuple[float, ...]  # a layer: max |difference| of a key element
    value_max: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Most that a forward of the same precision may be away from the reference."""

    logit_gap: float  # reference maximum minus reference logit of the emitted token
    logit: float  # |difference| of any logit, teacher-forced
    kl_mean: float
    kl_max: float
    key: tuple[float, ...]  # a layer
    value: tuple[float, ...]


def bounds(noise: Noise, safety: float = SAFETY) -> Bounds:
    return Bounds(
        logit_gap=bound(noise, safety),
        logit=safety * noise.logit_max,
        kl_mean=safety**2 * noise.kl_mean,
        kl_max=safety**2 * noise.kl_max,
        key=tuple(safety * value for value in noise.key_max),
        value=tuple(safety * value for value in noise.value_max),
    )


def bound(noise: Noise, safety: float = SAFETY) -> float:
    """Largest admissible gap of an emitted token, in logits: 2 max|e| times the safety factor (see the module)."""
    return 2 * safety * noise.logit_max


def measure(
    dtype: str, base: tuple[np.ndarray, np.ndarray, np.ndarray], runs: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> Noise:
    """Noise of `runs` against `base`; each is (logits [T, V], keys [L, T, H, D], values [L, T, H, D]), fp32."""
    kls = [kl(base[0], logits) for logits, _, _ in runs]
    return Noise(
        dtype=dtype,
        rows=base[0].shape[0],
        orders=len(runs),
        logit_max=max(float(np.abs(logits - base[0]).max()) for logits, _, _ in runs),
        kl_mean=max(float(values.mean()) for values in kls),
        kl_max=max(float(values.max()) for values in kls),
        key_max=_per_layer([np.abs(keys - base[1]) for _, keys, _ in runs]),
        value_max=_per_layer([np.abs(values - base[2]) for _, _, values in runs]),
    )


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a figure is spread over tokens."""

    median: float
    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """NaN in any token makes all of them NaN, which no bound admits."""
        middle, high = np.quantile(values, [0.5, 0.99])
        return cls(float(middle), float(values.mean()), float(high), float(values.max()))

    def over(self, orders: Sequence[Spread]) -> dict[str, float]:
        """Each figure over the largest of the orders'. inf over 0, but for 0 over 0: that is 0."""
        mine = dataclasses.asdict(self)
        most = {name: max(getattr(order, name) for order in orders) for name in mine}
        return {name: _ratio(mine[name], most[name]) for name in mine}


def _ratio(value: float, most: float) -> float:
    if most > 0:
        return value / most
    return 0.0 if value <= 0 else math.inf


def _per_layer(differences: list[np.ndarray]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.max([d.max(axis=(1, 2, 3)) for d in differences], axis=0))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in fp64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """KL(reference || candidate) a row, nats. [T, V], [T, V] -> [T]; NaN where the candidate is not finite."""
    p, q = log_softmax(reference), log_softmax(candidate)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def top1_agreement(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Share of rows with the same argmax."""
    return float((reference.argmax(axis=-1) == candidate.argmax(axis=-1)).mean())


def top1_violations(reference: np.ndarray, candidate: np.ndarray, gap: float) -> np.ndarray:
    """Rows whose candidate argmax the reference puts more than `gap` logits below its own: noise does not explain them."""
    chosen = np.take_along_axis(reference, candidate.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    return np.flatnonzero(~(reference.max(axis=-1) - chosen <= gap) | ~np.isfinite(candidate).all(axis=-1))
