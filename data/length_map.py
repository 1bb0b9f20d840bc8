"""The scale of a workload: lengths of the profile, made small enough for a trial in a way that keeps their order."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class LengthMap:
    """Maps a length to [low, high], linearly in its logarithm; lengths outside [least, most] are clipped."""

    least: int
    most: int
    low: int
    high: int

    def scaled(self, length: float) -> int:
        span = math.log(self.most / self.least)
        share = math.log(length / self.least) / span if span else 0.5
        return math.floor(self.low + min(max(share, 0.0), 1.0) * (self.high - self.low) + 0.5)

    def original(self, scaled: float) -> float:
        """Inverse of the map before rounding."""
        if self.high == self.low or self.most == self.least:
            return float(self.most)
        return float(self.least * (self.most / self.least) ** ((scaled - self.low) / (self.high - self.low)))

    def steps(self) -> list[float]:
        """The lengths at which the scaled one grows by a token, ascending: shorter ones are mapped below."""
        return [self.original(value + 0.5) for value in range(self.low, self.high)]
