"""The arithmetic of the fast tier: which two depths, and what their difference says of the layers between them.

A depth's seconds are those of what every depth has (embedding, head, sampling, the host: F layers' worth) and of its layers.
With noise in proportion to time, the seconds of measuring that a given interval of the difference takes go as
((2 F + s + d) / (d - s))^2 for depths s < d: with F = 2 and s = 1 that is 16 for d = 3, 6.2 for d = 5, 3.1 for d = 9. So the larger
depth holds PERIODS periods, where compiling, checking and capturing are still cheap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tideforge.engine import measure
from tideforge.engine.config import ModelConfig
from tideforge.errors import CandidateError

PERIODS = 5  # of the layer pattern at the larger depth, where that is at most half of the model
BLOCK_S = 0.05  # least seconds of a block: the same steps at both depths
LEAST_BLOCKS = 6  # before an interval ends a trial: the spread of fewer is luck
HOPELESS = 0.9  # a candidate that is surely below it is not measured more finely
Pairs = list[tuple[float, float]]


def depths_of(config: ModelConfig) -> tuple[int, int]:
    """(smaller, larger) numbers of layers: whole periods of the pattern of dense and sparse layers, after what leads it in.

    Raises CandidateError("refused") when the model is too short for two depths.
    """
    kinds = [config.is_sparse(index) for index in range(config.num_hidden_layers)]
    for lead in range(len(kinds)):
        rest = kinds[lead:]
        period = next(p for p in range(1, len(rest) + 1) if rest[p:] == rest[:-p])
        if (periods := len(rest) // period) >= 2:
            return lead + period, lead + period * max(2, min(PERIODS, periods // 2))
    raise CandidateError("refused", f"{len(kinds)} layers are too few for two depths; submit to the slow tier")


@dataclasses.dataclass(frozen=True)
class Reading:
    """Seconds of one planned step at the smaller and at the larger depth, of the incumbent and of the candidate."""

    incumbent: tuple[float, float]
    candidate: tuple[float, float]

    def __add__(self, other: Reading) -> Reading:
        (a, b), (c, d) = (
            zip(self.incumbent, other.incumbent, strict=True),
            zip(self.candidate, other.candidate, strict=True),
        )
        return Reading((sum(a), sum(b)), (sum(c), sum(d)))

    @property
    def seconds(self) -> float:
        """Of the side that took less, both depths together."""
        return min(sum(self.incumbent), sum(self.candidate))

    @property
    def between(self) -> tuple[float, float]:
        """Seconds of the layers between the depths: (incumbent's, candidate's)."""
        return self.incumbent[1] - self.incumbent[0], self.candidate[1] - self.candidate[0]


def readings(smaller: Sequence[tuple[float, float]], larger: Sequence[tuple[float, float]]) -> list[Reading]:
    """From the step pairs (incumbent's, candidate's seconds) of one replay at each depth."""
    return [Reading((s[0], d[0]), (s[1], d[1])) for s, d in zip(smaller, larger, strict=True)]


def blocks_of(steps: Sequence[Reading], least_s: float = BLOCK_S) -> Pairs:
    """Neighbouring steps put together until they take `least_s`: what is left over belongs to the last block."""
    blocks: list[Reading] = []
    for step in steps:
        if blocks and blocks[-1].seconds < least_s:
            blocks[-1] += step
        else:
            blocks.append(step)
    if len(blocks) > 1 and blocks[-1].seconds < least_s:
        rest = blocks.pop()
        blocks[-1] += rest
    return [block.between for block in blocks]


def ratio_of(between: Sequence[tuple[float, float]]) -> measure.Interval:
    """Speed of the candidate's layers over the incumbent's. Raises CandidateError("too_fast") when a side's cost nothing."""
    totals = [sum(column) for column in zip(*between, strict=True)]
    if min(totals) <= 0:
        raise CandidateError(
            "too_fast", f"the larger depth took {1e3 * min(totals):.3g} ms longer than the smaller one"
        )
    return measure.ratio_of_steps(between)


def enough(between: Sequence[tuple[float, float]]) -> bool:
    """Whether more blocks would change nothing that counts: surely hopeless, or known to measure.PRECISE."""
    if len(between) < LEAST_BLOCKS or min(sum(column) for column in zip(*between, strict=True)) <= 0:
        return False
    found = measure.ratio_of_steps(between)
    return found.high < HOPELESS or found.high - found.low < 2 * measure.PRECISE
