"""Who is in flight together: how long each number of spans was open at once, by hour of the day (UTC)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Micros = npt.NDArray[np.int64]
Held = dict[tuple[int, int], int]  # (hour of the day, spans open) -> microseconds
HOUR_US = 3_600_000_000


def held_by_hour(starts: Micros, ends: Micros, first_us: int, last_us: int) -> Held:
    """Time held at each level from `first_us` to `last_us`, level 0 included; spans are cut to that. Exact."""
    if last_us <= first_us:
        return {}
    open_from, open_to = np.clip(starts, first_us, last_us), np.clip(ends, first_us, last_us)
    lasting = open_to > open_from
    # The lowest bit tells an end from a start, so that one sort of plain integers does for both.
    events = np.concatenate([2 * open_from[lasting] + 1, 2 * open_to[lasting], [2 * first_us, 2 * last_us]])
    events.sort()
    change = (events & 1) * 2 - 1
    at = events >> 1
    # The two marks of the whole count as ends: what they take from the level is given back.
    level = np.cumsum(change) + 1
    level[-1] += 1
    marks = np.arange(first_us // HOUR_US + 1, -(-last_us // HOUR_US), dtype=np.int64) * HOUR_US
    places = np.searchsorted(at, marks, side="right")
    level, at = np.insert(level, places, level[places - 1]), np.insert(at, places, marks)
    codes = level[:-1] * 24 + at[:-1] // HOUR_US % 24
    sums = np.bincount(codes, weights=np.diff(at).astype(np.float64))  # exact: below 2**53 microseconds
    return {(int(code % 24), int(code // 24)): int(sums[code]) for code in np.flatnonzero(sums)}


def idle_by_hour(first_us: int, last_us: int) -> dict[int, int]:
    """Microseconds of a stretch of time by hour of the day."""
    empty = np.empty(0, dtype=np.int64)
    return {hour: held for (hour, _), held in held_by_hour(empty, empty, first_us, last_us).items()}


def over_the_day(held: Held) -> dict[int, tuple[float, int]]:
    """Hour of the day -> mean and most of the level."""
    found: dict[int, tuple[float, int]] = {}
    for hour in sorted({hour for hour, _ in held}):
        here = {level: time_us for (at, level), time_us in held.items() if at == hour and time_us}
        if whole := sum(here.values()):
            found[hour] = (sum(level * time_us for level, time_us in here.items()) / whole, max(here))
    return found
