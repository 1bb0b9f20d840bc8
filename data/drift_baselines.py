"""Two plain watches for `bench_drift` to compare with: what is usually set up. Both look at the last 24 hours.

They compare with all of history, not with the same hours of the week, and know no noise; only their threshold is tuned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tideforge.data.hourly import OUTPUT_BINS, OUTPUT_LOW, PROMPT_BINS, PROMPT_LOW, Hourly
from tideforge.data.watches import DAY, cells_of, rolling, shapes_of

Floats = NDArray[np.float64]
BASELINES = ("psi", "mean")
PSEUDO = 0.5  # requests added to each cell


def psi(history: Hourly, traffic: Hourly) -> Floats:
    """[hours] the largest population stability index of any scope's joint histogram, in cells of two octaves."""
    old = shapes_of(history).sum(axis=0) + PSEUDO
    new = rolling(shapes_of(traffic), DAY) + PSEUDO
    p, q = old / old.sum(axis=1, keepdims=True), new / new.sum(axis=2, keepdims=True)
    return np.asarray(((q - p) * np.log(q / p)).sum(axis=2).max(axis=1))


def mean(history: Hourly, traffic: Hourly) -> Floats:
    """[hours] the largest relative change of a scope's mean prompt or output length in tokens."""
    changes = []
    for axis, low, bins in ((3, PROMPT_LOW, PROMPT_BINS), (2, OUTPUT_LOW, OUTPUT_BINS)):
        middles = 2.0 ** (low + np.arange(bins) + 0.5)
        tokens = np.repeat(middles, OUTPUT_BINS) if axis == 3 else np.tile(middles, PROMPT_BINS)
        old, new = (np.stack([cells @ tokens, cells.sum(axis=2)]) for cells in (cells_of(history), cells_of(traffic)))
        before = old[0].sum(axis=0) / np.maximum(old[1].sum(axis=0), 1.0)
        after = rolling(new[0], DAY) / np.maximum(rolling(new[1], DAY), 1.0)
        changes.append(np.abs(after / np.maximum(before, 1.0) - 1))
    return np.asarray(np.concatenate(changes, axis=1).max(axis=1))
