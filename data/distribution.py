"""Arithmetic on the binned lengths of a profile: marginals, distribution functions, quantiles, rank correlation."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable

from tideforge.data.profile_records import Cells, bin_edges


class Binned:
    """A distribution of lengths given by counts a bin; within a bin the logarithm of the length is taken as uniform."""

    def __init__(self, counts: Iterable[tuple[int, int]]) -> None:
        merged: dict[int, int] = {}
        for index, requests in counts:
            merged[index] = merged.get(index, 0) + requests
        self.bins = sorted(merged)
        self.counts = [merged[index] for index in self.bins]
        self.total = sum(self.counts)
        self.below = [0, *itertools.accumulate(self.counts)]

    def cdf(self, length: float) -> float:
        """Share of the requests that are shorter than `length`."""
        passed = 0.0
        for index, count in zip(self.bins, self.counts, strict=True):
            low, high = bin_edges(index)
            if length >= high:
                passed += count
            elif length > low:
                passed += count * math.log(length / low) / math.log(high / low)
        return passed / self.total

    def quantile(self, probability: float) -> float:
        target = min(max(probability, 0.0), 1.0) * self.total
        place = min(max(bisect.bisect_left(self.below, target) - 1, 0), len(self.bins) - 1)
        low, high = bin_edges(self.bins[place])
        share = (target - self.below[place]) / self.counts[place]
        return low * (high / low) ** share

    def standard_error(self, probability: float) -> float:
        """Of the quantile: half of what one standard deviation of its rank, to both sides, spans in lengths."""
        spread = math.sqrt(probability * (1 - probability) / self.total)
        return (self.quantile(probability + spread) - self.quantile(probability - spread)) / 2

    def mid_rank(self, index: int) -> float:
        place = self.bins.index(index)
        return self.below[place] + self.counts[place] / 2


def prompts(cells: Cells) -> Binned:
    return Binned((prompt, requests) for prompt, _, requests in cells)


def outputs(cells: Cells) -> Binned:
    return Binned((output, requests) for _, output, requests in cells)


def rank_correlation(cells: Cells) -> float:
    """Spearman's rho of prompt and output length over the joint histogram; 0 where one of them does not vary."""
    x, y = prompts(cells), outputs(cells)
    middle = x.total / 2
    both = [(x.mid_rank(prompt) - middle, y.mid_rank(output) - middle, number) for prompt, output, number in cells]
    xx, yy = sum(n * a * a for a, _, n in both), sum(n * b * b for _, b, n in both)
    return sum(n * a * b for a, b, n in both) / math.sqrt(xx * yy) if xx and yy else 0.0
