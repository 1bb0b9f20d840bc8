"""A profile as a record: the distributions of a traffic log that decide what to tune for. Aggregates only, no text.

Joint histograms are lists of (prompt bin, output bin, requests); bin k holds the lengths n with floor(4 log2 n) = k.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tideforge.data.files import canonical_json, sha256_bytes
from tideforge.errors import UserError

VERSION = 2  # 2 added ADDED; 1 can still be read, and keeps its hash
READABLE = (1, 2)
ADDED = ("cached", "joint_cached", "by_tenant", "day", "quantile_error")
BINS_PER_OCTAVE = 4
MOST_TENANTS = 64
NOT_SAID, NO_TOKENS = -2, -1  # bins of the cached prefix besides those of lengths
Cells = tuple[tuple[int, int, int], ...]
CachedCells = tuple[tuple[int, int, int, int], ...]


def bin_edges(index: int) -> tuple[int, int]:
    """Least length in a bin and least length above it."""
    return math.ceil(2 ** (index / BINS_PER_OCTAVE)), math.ceil(2 ** ((index + 1) / BINS_PER_OCTAVE))


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lengths(Record):
    """Tokens of a request. Keys of `quantiles` are p1, p50, p99.9 ...; a quantile is a value that occurred."""

    least: int
    most: int
    mean: float
    quantiles: dict[str, int]


class Group(Record):
    requests: int
    prompt_p50: int
    prompt_p90: int
    output_p50: int
    output_p90: int
    joint: Cells = ()  # empty for hours and tenants


class Arrivals(Record):
    mean_per_s: float
    per_minute: dict[str, int] = Field(description="p50, p90, p99 and most over the minutes of the log")
    dispersion: float | None = Field(description="variance / mean of requests a minute; 1 for a Poisson process")
    gap_cv: float | None = Field(description="standard deviation / mean of the gaps between arrivals; 1 for Poisson")


class Concurrency(Record):
    """Requests in flight together, weighted by time."""

    mean: float
    p50: int
    p90: int
    p99: int
    most: int
    measured_requests: int = Field(description="requests whose latency the log has; the others follow `rule`")
    rule: str


class DayHour(Record):
    """An hour of the day (UTC), over all days of the log."""

    requests: int
    observed_s: float = Field(description="how much of that hour lies between the first arrival and the last end")
    in_flight_mean: float
    in_flight_most: int
    decoding_mean: float = Field(
        description="of those in flight, past their first token: occupancy of the decode batch"
    )
    decoding_most: int


class Prefixes(Record):
    cached_share: float | None = Field(description="prompt tokens that the log says came from a prefix cache")
    repeated_share: float | None = Field(description="prompt blocks that had occurred before in the log")


class Turns(Record):
    """Conversations, where prompt blocks show which request goes on with which earlier one."""

    continued_share: float = Field(description="requests that a later turn goes on with")
    new_tokens: dict[str, int] = Field(description="quantiles: what a later turn adds to the last prompt and answer")
    think_s: dict[str, float] = Field(
        description="quantiles: from the last answer's end to the later turn; `rule` as above"
    )


class Profile(Record):
    version: int = VERSION
    bins_per_octave: int = BINS_PER_OCTAVE
    requests: int
    first_arrival: str
    span_s: float = Field(description="from first to last arrival, less `closed_days`")
    closed_days: int = Field(description="whole days of silence, a day or more at a time, that rates leave out")
    prompt: Lengths
    output: Lengths
    context: Lengths
    joint: Cells
    arrivals: Arrivals
    concurrency: Concurrency
    timings: dict[str, dict[str, float]]
    regions: dict[str, Group]
    models: dict[str, Group]
    hours: dict[str, Group]
    prefixes: Prefixes
    tenants: int
    turns: Turns | None = None  # None: the log shows no conversations
    cached: Lengths | None = Field(default=None, description="cached prefix, of the requests whose log says it")
    joint_cached: CachedCells = Field(
        default=(), description="(prompt bin, output bin, cached bin, requests); cached bin -1: no token, -2: not said"
    )
    by_tenant: dict[str, Group] = Field(
        default={}, description=f"by 12 hex digits of the name's SHA-256; the {MOST_TENANTS} with most requests"
    )
    day: dict[str, DayHour] = Field(default={}, description="load over the day, by hour (UTC)")
    quantile_error: float = Field(default=0.0, description="relative, at most; 0: every quantile occurred as it is")

    def to_json(self) -> bytes:
        without = {"turns"} if self.turns is None else set()
        if self.version == 1:
            without |= set(ADDED)
        return canonical_json(self.model_dump(mode="json", exclude=without))

    @property
    def sha256(self) -> str:
        """Over the content alone: neither paths nor the time of the run are in it."""
        return sha256_bytes(self.to_json())

    @classmethod
    def from_json(cls, raw: bytes | str, name: str = "profile") -> Profile:
        """UserError when it is no profile or one of another version."""
        try:
            value: Any = json.loads(raw)
            version = value["version"]
        except (ValueError, KeyError, TypeError):
            raise UserError(name, "is not a profile", "make it with `tideforge profile`") from None
        if version not in READABLE:
            known = " and ".join(map(str, READABLE))
            raise UserError(name, f"is a profile of version {version}", f"make it again: this reads versions {known}")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            field = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise UserError(f"{name}: {field}", error.errors()[0]["msg"], "make it with `tideforge profile`") from None

    @classmethod
    def read(cls, path: Path) -> Profile:
        return cls.from_json(path.read_bytes(), str(path))
