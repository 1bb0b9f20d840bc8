"""The watches of drift: hours that have come in against the same hours of the week in 28 days of history.

Everything is a sum over requests (log2 of a length, a cached share, one if the tenant is such) less what the same hours of
the week gave in history, over a window. A watch's score is that excess in units of what it is in history itself, where each
week is compared with the other weeks only; so neither curves of day and week nor noise that lasts for hours count as drift.

burst   6 hours, level 24 hours: mean log2 of prompt and output, mean cached share; each scope
spread  24 hours: how far both lengths lie from their usual middle, and how they go together; each scope
trend   the slope of the level over 7 days, each scope
shape   24 hours: Hellinger distance of the joint histogram of prompt and output, each scope
share   24 hours: shares of regions, tenants and models that history knows
arrived 24 hours: the largest share of a name that history hardly knows (below KNOWN); its score is the share itself

Lengths come in bins of one octave, their means from the middles: linear to a few percent where lengths spread over more
than one octave, blunt where they do not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tideforge.data.hourly import CACHED_BINS, OUTPUT_BINS, PROMPT_BINS, Hourly, Named

WEEK, DAY, BURST = 168, 24, 6
HISTORY = 4 * WEEK
LEAD = WEEK + DAY  # hours before a judged one that its windows reach back to
KNOWN = 0.01  # least share in history of a name that `share` watches
LEAST_REQUESTS = 20.0  # of a window; below it nothing is said
FAMILIES = ("burst", "level", "trend", "spread", "shape", "share", "arrived")
THRESHOLDS = Path(__file__).with_name("drift_thresholds.json")
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Sums:
    """Numbers that add up: tops [hours, features], and the requests that they are of, [hours, features]."""

    names: tuple[str, ...]
    tops: Floats
    requests: Floats


@dataclasses.dataclass(frozen=True)
class Scores:
    """One family: scores [hours, watches], and the excess itself (octaves, shares, a distance) in the same shape."""

    names: tuple[str, ...]
    scores: Floats
    excess: Floats


def moments(traffic: Hourly) -> Floats:
    """[hours, scopes, 6] sums of 1, x, y, x^2, y^2, xy over the requests: x, y the octaves of prompt and output."""
    x = np.repeat(np.arange(PROMPT_BINS) + 0.5, OUTPUT_BINS)
    y = np.tile(np.arange(OUTPUT_BINS) + 0.5, PROMPT_BINS)
    return cells_of(traffic) @ np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def cells_of(traffic: Hourly) -> Floats:
    return traffic.joint.reshape(*traffic.joint.shape[:2], -1).astype(float)


def sums_of(traffic: Hourly, found: Floats) -> Sums:
    """Mean lengths and cached share of each scope; `found` is moments(traffic)."""
    told = traffic.cached.sum(axis=2).astype(float)
    cached = traffic.cached @ ((np.arange(CACHED_BINS) + 0.5) / CACHED_BINS)
    names = tuple(f"{scope}: {what}" for what in ("prompt", "output", "cached share") for scope in traffic.scopes)
    return Sums(names, np.hstack([found[..., 1], found[..., 2], cached]), np.hstack([found[..., 0]] * 2 + [told]))


def spreads_of(traffic: Hourly, found: Floats, centres: Floats) -> Sums:
    """Squares and product of both lengths about `centres` [2, scopes], of each scope."""
    n, x, y, xx, yy, xy = np.moveaxis(found, 2, 0)
    a, b = centres
    tops = [xx - 2 * a * x + a * a * n, yy - 2 * b * y + b * b * n, xy - b * x - a * y + a * b * n]
    whats = ("prompt spread", "output spread", "prompt with output")
    return Sums(
        tuple(f"{scope}: {what}" for what in whats for scope in traffic.scopes), np.hstack(tops), np.hstack([n] * 3)
    )


def shares_of(traffic: Hourly, known: Sequence[str]) -> Sums:
    """Requests of the names `known` ("kind name"), as tops over all requests whose kind is told."""
    tops, requests = np.zeros((traffic.hours, len(known))), np.zeros((traffic.hours, len(known)))
    place = {label: number for number, label in enumerate(known)}
    for each in traffic.named:
        total = each.counts.sum(axis=1)
        for number, name in enumerate(each.names):
            if (label := f"{each.kind} {name}") in place:
                tops[:, place[label]] = each.counts[:, number]
        for label in known:
            if label.startswith(f"{each.kind} "):
                requests[:, place[label]] = total
    return Sums(tuple(known), tops, requests)


def shapes_of(traffic: Hourly) -> Floats:
    """[hours, scopes, cells] counts in cells of two octaves by two."""
    wide = (OUTPUT_BINS + 1) // 2
    cell = (np.arange(PROMPT_BINS) // 2)[:, None] * wide + np.arange(OUTPUT_BINS) // 2
    merged = np.zeros((PROMPT_BINS * OUTPUT_BINS, (PROMPT_BINS + 1) // 2 * wide))
    merged[np.arange(len(merged)), cell.ravel()] = 1
    return cells_of(traffic) @ merged


def rolling(values: Floats, hours: int) -> Floats:
    """Sums over the last `hours` rows, this one included; at the beginning over what there is."""
    total = np.cumsum(values, axis=0)
    total[hours:] = total[hours:] - total[:-hours]
    return total


def smoothed(week: Floats) -> Floats:
    """Sums with the hour before and after, around the week."""
    return week + np.roll(week, 1, axis=0) + np.roll(week, -1, axis=0)


@dataclasses.dataclass(frozen=True)
class Usual:
    """What each hour of the week is like: tops a request [168, features]; row 0 is the week hour of hour 0 of the epoch."""

    means: Floats

    @classmethod
    def of(cls, tops: Floats, requests: Floats) -> Usual:
        """From hours that begin at week hour 0. An hour of the week without requests is taken as the mean of all."""
        top = smoothed(tops.reshape(-1, WEEK, *tops.shape[1:]).sum(axis=0))
        base = smoothed(requests.reshape(-1, WEEK, *requests.shape[1:]).sum(axis=0))
        overall = top.sum(axis=0) / np.maximum(base.sum(axis=0), 1.0)
        return cls(np.where(base > 0, top / np.maximum(base, 1.0), overall))

    def at(self, week_hours: NDArray[np.int64]) -> Floats:
        return np.asarray(self.means[week_hours])


def other_weeks(tops: Floats, requests: Floats) -> Floats:
    """[hours, features]: each hour's usual value by the other weeks of the same history."""
    weeks = len(tops) // WEEK
    parts = []
    for week in range(weeks):
        kept = np.r_[0 : week * WEEK, (week + 1) * WEEK : weeks * WEEK]
        parts.append(Usual.of(tops[kept], requests[kept]).means)
    return np.concatenate(parts)


def aligned(tops: Floats, first_week_hour: int) -> Floats:
    """Whole weeks, rolled so that row 0 is week hour 0."""
    return np.roll(tops, first_week_hour, axis=0)


def excess(tops: Floats, requests: Floats, usual: Floats, hours: int) -> Floats:
    """(sum of tops - sum of requests times usual) / requests over the window; 0 where the window is too thin."""
    base = rolling(requests, hours)
    return np.where(base >= LEAST_REQUESTS, rolling(tops - requests * usual, hours) / np.maximum(base, 1.0), 0.0)


def slope(level: Floats) -> Floats:
    """By how much a level (24 hours) rose over the last week: least squares over seven days; 0 in the first six days."""
    weights = (np.arange(7) - 3) / 28 * 7
    found = np.zeros_like(level)
    rows = len(level) - 6 * DAY
    if rows > 0:
        found[6 * DAY :] = sum(weight * level[day * DAY : day * DAY + rows] for day, weight in enumerate(weights))
    return found


def hellinger(counts: Floats, requests: Floats, usual: Floats, hours: int) -> Floats:
    """[hours, scopes]: 1 - sum of sqrt(p q), p the window's shares of cells and q those of the same hours usually."""
    base, expected = rolling(counts, hours), rolling(requests[..., None] * usual, hours)
    both = base.sum(axis=2) * expected.sum(axis=2)
    overlap = np.sqrt(np.maximum(base * expected, 0.0)).sum(axis=2) / np.sqrt(np.maximum(both, 1.0))
    return np.where(base.sum(axis=2) >= LEAST_REQUESTS, 1.0 - overlap, 0.0)


def spread(values: Floats, skip: int) -> Floats:
    """Root mean square a column, of history from hour `skip` on; never 0, so that a score is finite."""
    return np.maximum(np.sqrt((values[skip:] ** 2).mean(axis=0)), 1e-6)


@dataclasses.dataclass(frozen=True)
class Reference:
    """History as watches need it: usual values and the noise of each watch."""

    known: tuple[str, ...]
    scopes: tuple[str, ...]
    centres: Floats  # [2, scopes] mean octave of prompt and output: what spreads are taken about
    lengths: Usual
    spreads: Usual
    shares: Usual
    shapes: Usual
    noise: dict[str, Floats]  # family -> [features]
    shape_mean: Floats

    @classmethod
    def of(cls, history: Hourly) -> Reference:
        """`history` is whole weeks, at least two; ValueError otherwise."""
        if history.hours < 2 * WEEK or history.hours % WEEK:
            raise ValueError(f"history of {history.hours} hours is not two whole weeks or more")
        turn = history.first_hour % WEEK
        known, found = known_names(history), moments(history)
        centres = (found[..., 1:3].sum(axis=0) / np.maximum(found[..., :1].sum(axis=0), 1.0)).T
        noise: dict[str, Floats] = {}
        usuals: dict[str, Usual] = {}
        every = {
            "level": sums_of(history, found),
            "spread": spreads_of(history, found, centres),
            "share": shares_of(history, known),
        }
        for family, sums in every.items():
            tops, requests = aligned(sums.tops, turn), aligned(sums.requests, turn)
            others = other_weeks(tops, requests)
            usuals[family] = Usual.of(tops, requests)
            level = excess(tops, requests, others, DAY)
            noise[family] = spread(level, DAY)
            if family == "level":
                noise["burst"] = spread(excess(tops, requests, others, BURST), DAY)
                noise["trend"] = spread(slope(level), 7 * DAY)
        cells, count = aligned(shapes_of(history), turn), aligned(history.requests.astype(float), turn)
        whole = np.broadcast_to(count[..., None], cells.shape)
        apart = hellinger(cells, count, other_weeks(cells, whole), DAY)[DAY:]
        noise["shape"] = np.maximum(apart.std(axis=0), 1e-6)
        shape = Usual.of(cells, whole)
        return cls(
            known, history.scopes, centres, usuals["level"], usuals["spread"], usuals["share"], shape, noise,
            apart.mean(axis=0),
        )  # fmt: skip

    def scores(self, traffic: Hourly) -> dict[str, Scores]:
        """Of every hour; the first LEAD hours are the lead-in of windows and mean little. Scopes as in history."""
        week_hours = (traffic.first_hour + np.arange(traffic.hours)) % WEEK
        moment = moments(traffic)
        sums, shares = sums_of(traffic, moment), shares_of(traffic, self.known)
        wide = spreads_of(traffic, moment, self.centres)
        usual = self.lengths.at(week_hours)
        burst, level = (excess(sums.tops, sums.requests, usual, hours) for hours in (BURST, DAY))
        share = excess(shares.tops, shares.requests, self.shares.at(week_hours), DAY)
        apart = excess(wide.tops, wide.requests, self.spreads.at(week_hours), DAY)
        shape = hellinger(shapes_of(traffic), traffic.requests.astype(float), self.shapes.at(week_hours), DAY)
        found = {
            family: Scores(sums.names, np.abs(values) / self.noise[family], values)
            for family, values in (("burst", burst), ("level", level), ("trend", slope(level)))
        }
        found["shape"] = Scores(
            tuple(f"{scope}: joint" for scope in self.scopes), (shape - self.shape_mean) / self.noise["shape"], shape
        )
        found["spread"] = Scores(wide.names, np.abs(apart) / self.noise["spread"], apart)
        found["share"] = Scores(self.known, np.abs(share) / self.noise["share"], share)
        found["arrived"] = arrived(traffic, self.known)
        return found


def known_names(history: Hourly) -> tuple[str, ...]:
    return tuple(
        f"{each.kind} {name}"
        for each in history.named
        for name, share in zip(each.names, each.counts.sum(axis=0) / max(1, each.counts.sum()), strict=True)
        if share >= KNOWN
    )


def arrived(traffic: Hourly, known: Sequence[str]) -> Scores:
    names: list[str] = []
    columns: list[Floats] = []
    for each in traffic.named:
        total = rolling(each.counts.sum(axis=1).astype(float), DAY)
        for number in strangers(each, known):
            names.append(f"{each.kind} {each.names[number]}")
            count = rolling(each.counts[:, number].astype(float), DAY)
            columns.append(np.where(total >= LEAST_REQUESTS, count / np.maximum(total, 1.0), 0.0))
    values = np.stack(columns, axis=1) if columns else np.zeros((traffic.hours, 0))
    return Scores(tuple(names), values, values)


def strangers(each: Named, known: Sequence[str]) -> list[int]:
    return [number for number, name in enumerate(each.names) if f"{each.kind} {name}" not in known]


def thresholds(rate: float, table: Path = THRESHOLDS) -> dict[str, float]:
    """family -> threshold of its scores, of the frozen row whose requests an hour are nearest (by ratio)."""
    rows = json.loads(table.read_text())["watches"]
    nearest = min(rows, key=lambda row: abs(np.log(float(row) / max(rate, 1.0))))
    return {family: float(value) for family, value in rows[nearest].items()}


def ratios(found: dict[str, Scores], limits: dict[str, float]) -> Floats:
    """[hours, families] the largest score of each family over its threshold: 1 and more is an alarm."""
    return np.stack([found[family].scores.max(axis=1, initial=0.0) / limits[family] for family in FAMILIES], axis=1)
