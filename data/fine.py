"""Fine logarithmic bins: bin k holds the numbers n with floor(80 log2 n) = k, so 20 of them are one bin of a profile's joint
histogram, and a number taken from the middle of its bin is off by at most `ERROR`. Bin -1 is the number 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tideforge.data.profile_records import BINS_PER_OCTAVE

PER_COARSE = 20
PER_OCTAVE = BINS_PER_OCTAVE * PER_COARSE
ERROR = 0.01  # 0.0087 at the worst: bins begin to hold two numbers above 114, and half a wide bin is 0.0043


def middle(index: int) -> int:
    """The number that stands for a bin: its only one where it has one, else the geometric middle."""
    if index < 0:
        return 0
    low, above = math.ceil(2 ** (index / PER_OCTAVE)), math.ceil(2 ** ((index + 1) / PER_OCTAVE))
    return low if above - low <= 1 else min(max(round(2 ** ((index + 0.5) / PER_OCTAVE)), low), above - 1)


def quantiles(counts: Mapping[int, int], probabilities: Sequence[float]) -> list[int]:
    """Of the numbers that `counts` (bin -> how many) hold: the bin is the exact quantile's, the number its middle."""
    ordered = sorted(counts)
    total, passed, place, found = sum(counts.values()), counts[ordered[0]], 0, []
    for probability in probabilities:
        rank = max(1, math.ceil(probability * total - 1e-9))
        while passed < rank:
            place += 1
            passed += counts[ordered[place]]
        found.append(middle(ordered[place]))
    return found
