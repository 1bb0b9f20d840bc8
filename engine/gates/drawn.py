"""Draws recomputed without torch, and whether many of them follow the reference. engine/sampler.py is what is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

EXACT = 1e-9  # a share this close to the edge between two tokens may be summed to either side of it
MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """The share in [0, 1) that a token at `position` of a request of that seed is drawn with."""
    return (_mix((_mix(seed & MASK) + position) & MASK) >> 11) / (1 << 53)


def _mix(value: int) -> int:
    """SplitMix64's finaliser."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def ranked(logits: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens from the likeliest on, and the cumulative probability up to each, itself included. [V] -> [V], [V]."""
    order = np.argsort(-logits, kind="stable")
    above = (logits[order].astype(np.float64) - logits.max()) / temperature
    weights = np.exp(above)
    return order, np.cumsum(weights / weights.sum())


def could_be(token: int, logits: np.ndarray, temperature: float, top_p: float, share: float) -> bool:
    """Whether `share` draws that token: it lies within EXACT of the token's part of the nucleus."""
    order, cumulative = ranked(logits, temperature)
    rank = int(np.flatnonzero(order == token)[0])
    below = np.concatenate(([0.0], cumulative))[rank]
    for edge in (top_p - EXACT, top_p + EXACT):
        last = max(int(np.searchsorted(cumulative, edge)), 0)  # the rank at which the nucleus reaches top_p
        last = min(last, len(cumulative) - 1)
        mass = cumulative[last]
        if rank <= last and below - EXACT <= share * mass < cumulative[rank] + EXACT:
            return True
    return False


def place(token: int, logits: np.ndarray, temperature: float, top_p: float) -> tuple[float, float, float]:
    """Of a token among the probabilities that it is drawn from: where its part begins and ends, in [0, 1] of the nucleus; and
    the probability of all likelier ones, which is below top_p where the token belongs to the nucleus at all."""
    order, cumulative = ranked(logits, temperature)
    rank = int(np.flatnonzero(order == token)[0])
    last = min(int(np.searchsorted(cumulative, top_p)), len(cumulative) - 1)
    mass, below = cumulative[last], np.concatenate(([0.0], cumulative))[rank]
    return min(below / mass, 1.0), min(cumulative[rank] / mass, 1.0), float(below)


def g_statistic(shares: Sequence[float], bins: int) -> float:
    """G of shares in [0, 1) against a uniform distribution: chi-square with bins - 1 degrees of freedom, if they are."""
    counts = np.bincount(np.minimum((np.asarray(shares) * bins).astype(int), bins - 1), minlength=bins)
    seen = counts[counts > 0]
    return float(2 * (seen * np.log(seen * bins / len(shares))).sum())


def chi_square_limit(degrees: int, false_alarm: float) -> float:
    """Upper quantile, by Wilson and Hilferty (1931): within 2 % for the degrees used here."""
    z = NormalDist().inv_cdf(1 - false_alarm)
    return float(degrees * (1 - 2 / (9 * degrees) + z * np.sqrt(2 / (9 * degrees))) ** 3)
