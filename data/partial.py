"""The partial profile of one day: counts that add up over days, beside the day's rows under the hash of what they cover.

Rules at midnight (UTC). A request belongs to the day of its arrival. A duplicate is what day_twice.sql says. A request
still in flight at midnight counts in the concurrency of the next day as well, if that has requests, and no further: a
window ends with its last day. A block is repeated, and a conversation goes on, where an earlier request of the same day or
the day before had it. So a partial depends on its day and the two before: a row that comes late makes at most three of
them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from tideforge.data.days import Days, midnight_us, next_day, previous_day, replace_older, sql
from tideforge.data.files import canonical_json, whole
from tideforge.data.profile import rates
from tideforge.data.readers import room
from tideforge.data.sweep import Held, Micros, held_by_hour

VERSION = 1
PROFILED = "arrival, prompt_tokens, output_tokens, cached_tokens, ttft_ms, latency_ms, model, region, tenant"
LINKED = "arrival, request_id, prompt_tokens, output_tokens, latency_ms, prefix_hashes"
DAY_US, MINUTE_US = 86_400_000_000, 60_000_000
META = b"tideforge.partial"
HISTOGRAMS = pa.schema(
    [
        pa.field("histogram", pa.string()),
        pa.field("by_kind", pa.string()),
        pa.field("by_value", pa.string()),
        pa.field("x", pa.int64()),
        pa.field("y", pa.int64()),
        pa.field("z", pa.int64()),
        pa.field("weight", pa.int64()),
    ]
)
Row = tuple[str, str, str, int, int, int, int]


class Totals(BaseModel):
    """What of a day is one number. Times are microseconds since 1970; totals are tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    day: str
    covers: str
    requests: int
    first_us: int
    last_us: int
    prompt_least: int
    prompt_most: int
    prompt_total: int
    output_least: int
    output_most: int
    output_total: int
    context_least: int
    context_most: int
    context_total: int
    cached_least: int | None
    cached_most: int | None
    cached_total: int | None
    cached_requests: int
    cached_prompt_total: int | None
    with_latency: int
    gap_squares: int  # over the gaps between arrivals within the day
    carried: int  # requests of the day before that were in flight at midnight
    last_end_us: int  # of those in flight at any time of the day, at most the next midnight
    blocks: int = 0
    repeated_blocks: int = 0
    with_blocks: int = 0  # requests
    later_turns: int = 0


def partial_of(days: Days, day: str) -> Path:
    """The day's partial; made where it is not there or covers something else."""
    covers = days.covers([previous_day(previous_day(day)), previous_day(day), day])
    target = days.folder / "days" / day / f"partial-{VERSION}-{covers[:16]}.parquet"
    if not target.exists():
        with days.limits.connect() as db, room():
            totals, table = make_partial(db, days, day, covers)
        with whole(target) as temporary:
            meta = {META: canonical_json(totals.model_dump(mode="json"))}
            pq.write_table(table.replace_schema_metadata(meta), temporary, compression="zstd")
        replace_older(target, "partial-*.parquet")
    return target


def read_totals(path: Path) -> Totals:
    return Totals.model_validate(json.loads((pq.read_schema(path).metadata or {})[META]))


def make_partial(db: duckdb.DuckDBPyConnection, days: Days, day: str, covers: str) -> tuple[Totals, pa.Table]:
    db.execute(f"CREATE TEMP VIEW kept AS {days.kept(day, PROFILED)}")
    db.execute(sql("day_rows"))
    totals = one_row(db, sql("day_totals"))
    if not totals["requests"]:  # all of them are duplicates of the day before
        zeros = {name: value or 0 for name, value in totals.items()}
        return Totals(day=day, covers=covers, **zeros, gap_squares=0, carried=0, last_end_us=0), table_of([])
    rows, load = sweep_day(db, days, day)
    linked, shared = share_prefixes(db, days, day)
    made = Totals(day=day, covers=covers, **totals, **load, **shared)
    return made, pa.concat_tables([as_table(db, sql("day_histograms")), table_of([*rows, *linked])])


def one_row(db: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    result = db.execute(query)
    names = [column[0] for column in result.description or ()]
    return dict(zip(names, result.fetchall()[0], strict=True))


def as_table(db: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    return db.sql(query).to_arrow_table().cast(HISTOGRAMS)


def table_of(rows: list[Row]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(HISTOGRAMS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, HISTOGRAMS, strict=True)], schema=HISTOGRAMS)


SPANS = """
SELECT start_us, start_us + coalesce(latency_us, prefill_us + output_us) AS end_us,
       start_us + least(
           coalesce(latency_us, prefill_us + output_us),
           coalesce(ttft_us, latency_us * prefill_us // (prefill_us + output_us), prefill_us)
       ) AS decode_us
FROM (
    SELECT start_us, latency_us, ttft_us,
           prompt::BIGINT * $prefill_us_per_token AS prefill_us, output::BIGINT * $decode_us_per_token AS output_us
    FROM {rows}
)
"""


def spans_of(db: duckdb.DuckDBPyConnection, rows: str, where: str = "") -> tuple[Micros, Micros, Micros]:
    """Start, end and begin of decoding as in sql/spans.sql."""
    found = db.execute(SPANS.format(rows=rows) + where, rates()).fetchnumpy()
    start, end, decode = (np.asarray(found[name], dtype=np.int64) for name in ("start_us", "end_us", "decode_us"))
    return start, end, decode


def sweep_day(db: duckdb.DuckDBPyConnection, days: Days, day: str) -> tuple[list[Row], dict[str, int]]:
    """Arrivals a minute, gaps and who is in flight, with those of the day before who still are."""
    first, last = midnight_us(day), midnight_us(next_day(day))
    start, end, decode = spans_of(db, "day")
    arrivals = np.sort(start)
    carried = carried_spans(db, days, day)
    rows = minutes(arrivals, first)
    squares = sum_of_squares(np.diff(arrivals))
    del arrivals
    ends = np.concatenate([end, carried[1]])
    rows += held_rows("in_flight", held_by_hour(np.concatenate([start, carried[0]]), ends, first, last))
    rows += held_rows("decoding", held_by_hour(np.concatenate([decode, carried[2]]), ends, first, last))
    last_end = min(int(ends.max()), last)
    return rows, {"gap_squares": squares, "carried": len(carried[0]), "last_end_us": last_end}


def carried_spans(db: duckdb.DuckDBPyConnection, days: Days, day: str) -> tuple[Micros, Micros, Micros]:
    before = previous_day(day)
    if not days.parts(before):
        return tuple(np.empty(0, dtype=np.int64) for _ in range(3))  # type: ignore[return-value]
    columns = (
        "epoch_us(arrival) AS start_us, prompt_tokens AS prompt, output_tokens AS output, "
        "round(latency_ms * 1000)::BIGINT AS latency_us, round(ttft_ms * 1000)::BIGINT AS ttft_us"
    )
    return spans_of(db, f"({days.kept(before, columns)})", f" WHERE end_us > {midnight_us(day)}")


def minutes(arrivals: Micros, first: int) -> list[Row]:
    """Requests in each minute of the day, from 0; minutes without any are left out."""
    counts = np.bincount((arrivals - first) // MINUTE_US, minlength=1)
    return [("minute", "all", "", int(at), 0, 0, int(counts[at])) for at in np.flatnonzero(counts)]


def held_rows(name: str, held: Held) -> list[Row]:
    return [(name, "all", "", hour, level, 0, time_us) for (hour, level), time_us in sorted(held.items())]


def sum_of_squares(values: Micros) -> int:
    """Exact for up to 2**22 values below 2**37 at a time: with the number split in two, no product leaves 64 bits."""
    total = 0
    for chunk in np.array_split(values, max(1, len(values) >> 20)):
        high: npt.NDArray[np.int64] = chunk >> 20
        low = chunk & (2**20 - 1)
        total += (int(high @ high) << 40) + (int(high @ low) << 21) + int(low @ low)
    return total


def share_prefixes(db: duckdb.DuckDBPyConnection, days: Days, day: str) -> tuple[list[Row], dict[str, int]]:
    """Blocks and conversations of the day, known from it and the day before."""
    here = days.kept(day, LINKED)
    if not db.execute(f"SELECT count(prefix_hashes) FROM ({days.kept(day, 'prefix_hashes')})").fetchall()[0][0]:
        return [], {}
    before = days.kept(previous_day(day), LINKED) if days.parts(previous_day(day)) else ""
    db.execute(f"CREATE TEMP TABLE active AS {here}{' UNION ALL ' + before if before else ''}")
    first = midnight_us(day)
    counts = one_row(db, sql("day_blocks").replace("$midnight_us", str(first)))
    db.execute(sql("links"), rates())
    linked = f"FROM links WHERE at_us >= {first}"
    counts |= one_row(db, f"SELECT count(*) AS later_turns {linked}")
    rows = []
    for name in ("new_tokens", "think_us"):
        fine = f"CASE WHEN {name} = 0 THEN -1 ELSE floor(80 * log2({name})) END::BIGINT"
        query = f"SELECT {fine} AS x, count(*) {linked} GROUP BY x ORDER BY x"
        rows += [(name, "all", "", x, 0, 0, number) for x, number in db.execute(query).fetchall()]
    return rows, counts
