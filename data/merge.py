"""A profile of any window of days out of their partials: counts exact, quantiles within 1 % (data/fine.py).

It says what `make_profile` says of the same rows, but for the rules at midnight in data/partial.py, for minutes, which are
those of the clock, and for silence: calendar days without a request are left out.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tideforge.data import fine
from tideforge.data.days import Days, between, midnight_us, next_day, previous_day
from tideforge.data.partial import DAY_US, MINUTE_US, Totals, partial_of, read_totals
from tideforge.data.profile import NAMES, PROBABILITIES, arrivals_text, day_of, in_flight_of, largest, ranked
from tideforge.data.profile_records import Arrivals, Group, Lengths, Prefixes, Profile, Turns
from tideforge.data.readers import connect
from tideforge.data.sweep import Held, idle_by_hour
from tideforge.errors import UserError

Counts = dict[int, int]


class Histograms:
    """The sum of the partials' histograms."""

    def __init__(self, paths: Sequence[Path]) -> None:
        db = connect()
        tables = pa.concat_tables([pq.read_table(path).replace_schema_metadata(None) for path in paths])
        db.register("partials", tables)
        # Minutes stay apart by day: their own counts are what is looked at.
        rows = db.execute(
            "SELECT histogram, by_kind, by_value, x, y, z, sum(weight)::BIGINT FROM partials "
            "WHERE histogram != 'minute' GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        self.minutes = sorted(tables.filter(pa.compute.field("histogram") == "minute")["weight"].to_pylist())
        self.cells: dict[tuple[str, str, str], list[tuple[int, int, int, int]]] = {}
        for name, kind, value, *cell in rows:
            self.cells.setdefault((name, kind, value), []).append((cell[0], cell[1], cell[2], cell[3]))

    def counts(self, name: str, kind: str = "all", value: str = "") -> Counts:
        return {x: weight for x, _, _, weight in self.cells.get((name, kind, value), ())}

    def values(self, kind: str) -> list[str]:
        return sorted({value for name, of, value in self.cells if of == kind and name == "prompt"})

    def held(self, name: str) -> Held:
        return {(x, y): weight for x, y, _, weight in self.cells.get((name, "all", ""), ())}


def profile_days(days: Days, first: str | None = None, last: str | None = None) -> Profile:
    """Profile of the days from `first` to `last` (dates, both included); partials that are missing are made."""
    known = days.days
    window = [day for day in known if (first is None or day >= first) and (last is None or day <= last)]
    part = days.one_of(days.limits.workers)
    days.settle(sorted({day for at in window for day in (previous_day(at), at)} & set(known)))
    with concurrent.futures.ThreadPoolExecutor(days.limits.workers) as pool:
        return merge(list(pool.map(lambda day: partial_of(part, day), window)))


def merge(paths: Sequence[Path]) -> Profile:
    """UserError when no day has a request. Order does not matter; no two are of one day."""
    with_totals = sorted(((read_totals(path), path) for path in paths), key=lambda each: each[0].day)
    given = [(totals, path) for totals, path in with_totals if totals.requests]
    if not given:
        raise UserError("traffic log", "has no good rows in that window", "name days that it has")
    totals = [each for each, _ in given]
    return assemble(totals, Histograms([path for _, path in given]))


def assemble(totals: Sequence[Totals], seen: Histograms) -> Profile:
    requests = sum(each.requests for each in totals)
    closed = len(list(between(totals[0].day, totals[-1].day))) - len(totals)
    span_us = totals[-1].last_us - totals[0].first_us - closed * DAY_US
    in_flight, decoding = (trimmed(seen.held(name), totals) for name in ("in_flight", "decoding"))
    joint = seen.cells["joint", "all", ""]
    groups = {kind: groups_of(seen, kind) for kind in ("region", "model", "hour", "tenant")}
    return Profile(
        requests=requests,
        first_arrival=arrivals_text(totals[0].first_us),
        span_s=span_us / 1e6,
        closed_days=closed,
        prompt=lengths_of(seen, totals, "prompt", requests),
        output=lengths_of(seen, totals, "output", requests),
        context=lengths_of(seen, totals, "context", requests),
        joint=tuple((x, y, weight) for (x, y), weight in summed((x, y, weight) for x, y, _, weight in joint)),
        arrivals=arrivals_of(seen, totals, requests, span_us),
        concurrency=in_flight_of(by_level(in_flight), sum(each.with_latency for each in totals)),
        timings=timings_of(seen),
        regions=groups["region"],
        models=groups["model"],
        hours=groups["hour"],
        prefixes=prefixes_of(totals),
        tenants=len(groups["tenant"]),
        turns=turns_of(seen, totals),
        cached=cached_of(seen, totals),
        joint_cached=tuple(sorted(joint)),
        by_tenant=largest(groups["tenant"]),
        day=day_of(groups["hour"], in_flight, decoding),
        quantile_error=fine.ERROR,
    )


def summed(cells: Iterable[tuple[int, int, int]]) -> list[tuple[tuple[int, int], int]]:
    found: dict[tuple[int, int], int] = {}
    for x, y, weight in cells:
        found[x, y] = found.get((x, y), 0) + weight
    return sorted(found.items())


def by_level(held: Held) -> Counts:
    found: Counts = {}
    for (_, level), time_us in held.items():
        found[level] = found.get(level, 0) + time_us
    return found


def named(counts: Counts) -> dict[str, int]:
    return dict(zip(NAMES, fine.quantiles(counts, PROBABILITIES), strict=True))


def lengths_of(seen: Histograms, totals: Sequence[Totals], kind: str, requests: int) -> Lengths:
    """Least, most and mean are exact."""
    facts = [each.model_dump() for each in totals if each.model_dump()[f"{kind}_least"] is not None]
    least, most = min(each[f"{kind}_least"] for each in facts), max(each[f"{kind}_most"] for each in facts)
    inside = {name: min(max(value, least), most) for name, value in named(seen.counts(kind)).items()}
    return Lengths(
        least=least, most=most, mean=sum(each[f"{kind}_total"] for each in facts) / requests, quantiles=inside
    )


def cached_of(seen: Histograms, totals: Sequence[Totals]) -> Lengths | None:
    told = sum(each.cached_requests for each in totals)
    return lengths_of(seen, totals, "cached", told) if told else None


def groups_of(seen: Histograms, kind: str) -> dict[str, Group]:
    found = {}
    for value in seen.values(kind):
        prompts, outputs = seen.counts("prompt", kind, value), seen.counts("output", kind, value)
        prompt_p50, prompt_p90 = fine.quantiles(prompts, (0.5, 0.9))
        output_p50, output_p90 = fine.quantiles(outputs, (0.5, 0.9))
        cells = seen.cells.get(("joint", kind, value), [])
        found[value] = Group(
            requests=sum(prompts.values()), prompt_p50=prompt_p50, prompt_p90=prompt_p90,
            output_p50=output_p50, output_p90=output_p90, joint=tuple((x, y, weight) for x, y, _, weight in cells),
        )  # fmt: skip
    return found


def arrivals_of(seen: Histograms, totals: Sequence[Totals], requests: int, span_us: int) -> Arrivals:
    """Over the minutes of the clock from that of the first arrival to that of the last, days without any left out."""
    number = (totals[-1].last_us // MINUTE_US) - (totals[0].first_us // MINUTE_US) + 1
    closed = len(list(between(totals[0].day, totals[-1].day))) - len(totals)
    empty = number - closed * DAY_US // MINUTE_US - len(seen.minutes)
    counts = [0] * empty + seen.minutes
    mean = requests / len(counts)
    squares = sum(count * count for count in seen.minutes)
    variance = (squares - requests * mean) / (len(counts) - 1) if len(counts) > 1 else None
    gaps = requests - 1
    gap_squares = sum(each.gap_squares for each in totals) + sum(gap * gap for gap in gaps_between(totals))
    spread = (gaps * gap_squares - span_us**2) / gaps**2 if gaps else 0.0
    return Arrivals(
        mean_per_s=requests / (span_us / 1e6) if span_us else float(requests),
        per_minute={
            "p50": ranked(counts, 0.5), "p90": ranked(counts, 0.9), "p99": ranked(counts, 0.99), "most": counts[-1],
        },
        dispersion=None if variance is None else variance / mean,
        gap_cv=math.sqrt(spread) * gaps / span_us if span_us else None,
    )  # fmt: skip


def gaps_between(totals: Sequence[Totals]) -> list[int]:
    """From a day's last arrival to the next day's first, microseconds; whole days without any left out."""
    return [
        later.first_us - earlier.last_us - (len(list(between(earlier.day, later.day))) - 2) * DAY_US
        for earlier, later in itertools.pairwise(totals)
    ]


def trimmed(held: Held, totals: Sequence[Totals]) -> Held:
    """Without the idle time before the window's first request and behind its last end."""
    first, last = totals[0], totals[-1]
    ends = [(last.last_end_us, midnight_us(next_day(last.day)))]
    if not first.carried:
        ends.append((midnight_us(first.day), first.first_us))
    left = dict(held)
    for start, end in ends:
        for hour, idle_us in idle_by_hour(start, end).items():
            left[hour, 0] -= idle_us
    return {cell: time_us for cell, time_us in left.items() if time_us}


def timings_of(seen: Histograms) -> dict[str, dict[str, float]]:
    found = {}
    for name in ("latency", "ttft"):
        if counts := seen.counts(f"{name}_us"):
            found[f"{name}_ms"] = {key: us / 1e3 for key, us in named(counts).items()}
    return found


def prefixes_of(totals: Sequence[Totals]) -> Prefixes:
    told, cached = (
        sum(getattr(each, name) or 0 for each in totals) for name in ("cached_prompt_total", "cached_total")
    )
    blocks, repeated = (sum(getattr(each, name) for each in totals) for name in ("blocks", "repeated_blocks"))
    return Prefixes(
        cached_share=cached / told if told else None,
        repeated_share=1 - (blocks - repeated) / blocks if blocks else None,
    )


def turns_of(seen: Histograms, totals: Sequence[Totals]) -> Turns | None:
    later, whole = (sum(getattr(each, name) for each in totals) for name in ("later_turns", "with_blocks"))
    if not later:
        return None
    think: dict[str, Any] = {name: us / 1e6 for name, us in named(seen.counts("think_us")).items()}
    return Turns(continued_share=later / whole, new_tokens=named(seen.counts("new_tokens")), think_s=think)
