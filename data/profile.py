"""Makes a profile of a traffic log with DuckDB. The queries are files in data/sql/.

Every aggregate is a count, an exact integer sum or a value that occurred, so threads and row order cannot change it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tideforge.data.files import whole
from tideforge.data.logs import find_logs
from tideforge.data.mapping import Format
from tideforge.data.profile_records import (
    MOST_TENANTS,
    Arrivals,
    CachedCells,
    Cells,
    Concurrency,
    DayHour,
    Group,
    Lengths,
    Prefixes,
    Profile,
    Turns,
    bin_edges,
)
from tideforge.data.readers import connect, read_logs
from tideforge.data.sweep import Held, held_by_hour, over_the_day
from tideforge.errors import UserError

PROBABILITIES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
NAMES = tuple(f"p{100 * probability:g}" for probability in PROBABILITIES)
PREFILL_US_PER_TOKEN, DECODE_US_PER_TOKEN = 250, 30_000
RULE = (
    f"a request without a latency is taken to last {PREFILL_US_PER_TOKEN / 1000:g} ms a prompt token "
    f"and {DECODE_US_PER_TOKEN / 1000:g} ms an output token"
)
MINUTE_US = 60_000_000


def profile_logs(patterns: Sequence[str], last_hours: float | None = None, formats: Sequence[Format] = ()) -> Profile:
    """Profile of the logs that `patterns` name, or of the last hours before their newest arrival.

    Bad rows are left out and not reported: `tideforge ingest` does that.
    """
    reading = read_logs(find_logs(patterns), formats)
    if last_hours is not None:
        keep_last(reading.db, last_hours)
    return make_profile(reading.db)


def open_requests(path: Path) -> duckdb.DuckDBPyConnection:
    """A connection whose table `requests` is a file that ingest wrote."""
    db = connect()
    db.execute("CREATE TABLE requests AS SELECT * FROM read_parquet(?)", [str(path)])
    return db


def keep_last(db: duckdb.DuckDBPyConnection, hours: float) -> None:
    db.execute(
        "DELETE FROM requests WHERE epoch_us(arrival) < (SELECT max(epoch_us(arrival)) FROM requests) - ?",
        [round(hours * 60 * MINUTE_US)],
    )


def keep_between(db: duckdb.DuckDBPyConnection, first: float, last: float) -> None:
    """Of the requests in order of arrival those between two shares of all, 0 to 1; equal arrivals stay together."""
    db.execute(
        "DELETE FROM requests WHERE arrival NOT IN (SELECT arrival FROM (SELECT arrival, min(place) AS place FROM ("
        "SELECT arrival, (row_number() OVER (ORDER BY arrival) - 1) / count(*) OVER () AS place FROM requests) GROUP BY arrival)"
        " WHERE place >= ? AND place < ?)",
        [first, last],
    )


def make_profile(db: duckdb.DuckDBPyConnection) -> Profile:
    """Profile of the table `requests`; UserError when it has no rows."""
    closed_days = close_silences(db)
    totals = ask(db, "totals")[0]
    if not totals["requests"]:
        raise UserError("traffic log", "has no good rows", "see the reasons with `tideforge ingest`")
    span_s = (totals["last_us"] - totals["first_us"]) / 1e6
    lengths = {row["kind"]: lengths_of(row) for row in ask(db, "lengths", probabilities())}
    groups = groups_of(db, joint_of(db))
    first = db.execute("SELECT min(epoch_us(arrival)) FROM requests").fetchall()[0][0]
    return Profile(
        requests=totals["requests"],
        first_arrival=arrivals_text(first),
        span_s=span_s,
        closed_days=closed_days,
        prompt=lengths["prompt"],
        output=lengths["output"],
        context=lengths["context"],
        joint=tuple(joint_of(db)["all", ""]),
        arrivals=arrivals_of(db, totals["requests"], span_s),
        concurrency=concurrency_of(db, totals["with_latency"]),
        timings={row["kind"]: dict(zip(NAMES, row["quantiles"], strict=True)) for row in timings(db)},
        regions=groups.get("region", {}),
        models=groups.get("model", {}),
        hours=groups.get("hour", {}),
        prefixes=prefixes_of(db),
        tenants=ask(db, "prefixes")[0]["tenants"],
        turns=turns_of(db),
        cached=lengths.get("cached"),
        joint_cached=cached_cells(db),
        by_tenant=largest(groups.get("tenant", {})),
        day=day_of(groups["hour"], *load_over_day(db)),
    )


def arrivals_text(at_us: int) -> str:
    return f"{datetime.datetime.fromtimestamp(at_us // 1_000_000, datetime.UTC):%Y-%m-%dT%H:%M:%S}.{at_us % 1_000_000:06d}Z"


def close_silences(db: duckdb.DuckDBPyConnection) -> int:
    """Makes the table `active` of sql/active.sql; the days of silence that were left out."""
    db.execute((resources.files("tideforge.data") / "sql" / "active.sql").read_text())
    row = db.execute(
        "SELECT (SELECT epoch_us(max(arrival)) - epoch_us(min(arrival)) FROM requests)"
        " - (SELECT epoch_us(max(arrival)) - epoch_us(min(arrival)) FROM active)"
    ).fetchall()[0]
    return int(row[0] or 0) // 86_400_000_000


def ask(db: duckdb.DuckDBPyConnection, name: str, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rows of data/sql/<name>.sql as dictionaries."""
    query = (resources.files("tideforge.data") / "sql" / f"{name}.sql").read_text()
    result = db.execute(query, values) if values else db.execute(query)
    columns = [column[0] for column in result.description or ()]
    return [dict(zip(columns, row, strict=True)) for row in result.fetchall()]


def probabilities() -> dict[str, Any]:
    return {"probabilities": list(PROBABILITIES)}


def timings(db: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    return ask(db, "timings", probabilities())


def lengths_of(row: dict[str, Any]) -> Lengths:
    quantiles = dict(zip(NAMES, row["quantiles"], strict=True))
    return Lengths(least=row["least"], most=row["most"], mean=row["total"] / row["requests"], quantiles=quantiles)


def joint_of(db: duckdb.DuckDBPyConnection) -> dict[tuple[str, str], list[tuple[int, int, int]]]:
    cells: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for row in ask(db, "joint"):
        cell = (row["prompt_bin"], row["output_bin"], row["requests"])
        cells.setdefault((row["by_kind"], row["by_value"]), []).append(cell)
    return cells


def cached_cells(db: duckdb.DuckDBPyConnection) -> CachedCells:
    rows = ask(db, "joint_cached")
    return tuple((row["prompt_bin"], row["output_bin"], row["cached_bin"], row["requests"]) for row in rows)


def groups_of(
    db: duckdb.DuckDBPyConnection, cells: dict[tuple[str, str], list[tuple[int, int, int]]]
) -> dict[str, dict[str, Group]]:
    """Kind -> value -> figures."""
    groups: dict[str, dict[str, Group]] = {}
    for row in ask(db, "groups"):
        kind, value = row.pop("by_kind"), row.pop("by_value")
        joint: Cells = tuple(cells.get((kind, value), ()))
        groups.setdefault(kind, {})[value] = Group(**row, joint=joint)
    return groups


def largest(tenants: dict[str, Group]) -> dict[str, Group]:
    kept = sorted(tenants, key=lambda name: (-tenants[name].requests, name))[:MOST_TENANTS]
    return {name: tenants[name] for name in sorted(kept)}


def load_over_day(db: duckdb.DuckDBPyConnection) -> tuple[Held, Held]:
    """Time held at each number in flight, and of those decoding, by hour of the day."""
    query = (resources.files("tideforge.data") / "sql" / "spans.sql").read_text()
    spans = db.execute(query, rates()).fetchnumpy()
    starts, ends, decoding = (np.asarray(spans[name], dtype=np.int64) for name in ("start_us", "end_us", "decode_us"))
    first, last = int(starts.min()), int(ends.max())
    return held_by_hour(starts, ends, first, last), held_by_hour(decoding, ends, first, last)


def day_of(hours: dict[str, Group], in_flight: Held, decoding: Held) -> dict[str, DayHour]:
    flight, batch = over_the_day(in_flight), over_the_day(decoding)
    observed = {hour: sum(held for (at, _), held in in_flight.items() if at == hour) / 1e6 for hour in range(24)}
    return {
        f"{hour:02d}": DayHour(
            requests=hours[f"{hour:02d}"].requests if f"{hour:02d}" in hours else 0,
            observed_s=observed[hour],
            in_flight_mean=flight[hour][0], in_flight_most=flight[hour][1],
            decoding_mean=batch[hour][0], decoding_most=batch[hour][1],
        )
        for hour in sorted(flight)
    }  # fmt: skip


def arrivals_of(db: duckdb.DuckDBPyConnection, requests: int, span_s: float) -> Arrivals:
    counts = sorted(row["requests"] for row in ask(db, "arrivals"))
    mean = requests / len(counts)
    variance = (
        (sum(count * count for count in counts) - requests * mean) / (len(counts) - 1) if len(counts) > 1 else None
    )
    gaps = ask(db, "gaps")[0]
    number, total, squares = gaps["gaps"], int(gaps["total"] or 0), int(gaps["squares"] or 0)
    spread = (number * squares - total * total) / number**2 if number else 0.0
    return Arrivals(
        mean_per_s=requests / span_s if span_s else float(requests),
        per_minute={
            "p50": ranked(counts, 0.5), "p90": ranked(counts, 0.9), "p99": ranked(counts, 0.99), "most": counts[-1],
        },
        dispersion=None if variance is None else variance / mean,
        gap_cv=math.sqrt(spread) * number / total if total else None,
    )  # fmt: skip


def ranked(ordered: Sequence[int], probability: float) -> int:
    return ordered[min(len(ordered) - 1, math.ceil(probability * len(ordered)) - 1)]


def rates() -> dict[str, Any]:
    return {"prefill_us_per_token": PREFILL_US_PER_TOKEN, "decode_us_per_token": DECODE_US_PER_TOKEN}


def concurrency_rows(db: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    return ask(db, "concurrency", rates())


def concurrency_of(db: duckdb.DuckDBPyConnection, measured: int) -> Concurrency:
    held: dict[int, int] = {}
    for row in concurrency_rows(db):
        held[row["level"]] = held.get(row["level"], 0) + row["held_us"]
    return in_flight_of(held, measured)


def in_flight_of(held: dict[int, int], measured: int) -> Concurrency:
    """`held`: number in flight -> microseconds; `measured`: requests whose latency the log has."""
    whole_us = sum(held.values())

    def level(probability: float) -> int:
        passed = 0
        for value in sorted(held):
            passed += held[value]
            if passed >= probability * whole_us:
                return value
        return 0  # nothing lasted any time: every latency in the log is zero

    mean = sum(value * length for value, length in held.items()) / whole_us if whole_us else 0.0
    return Concurrency(
        mean=mean, p50=level(0.5), p90=level(0.9), p99=level(0.99), most=max(held, default=0),
        measured_requests=measured, rule=RULE,
    )  # fmt: skip


def prefixes_of(db: duckdb.DuckDBPyConnection) -> Prefixes:
    row = ask(db, "prefixes")[0]
    return Prefixes(
        cached_share=row["cached_tokens"] / row["prompt_tokens"] if row["prompt_tokens"] else None,
        repeated_share=1 - row["distinct_blocks"] / row["blocks"] if row["blocks"] else None,
    )


def turns_of(db: duckdb.DuckDBPyConnection) -> Turns | None:
    db.execute((resources.files("tideforge.data") / "sql" / "links.sql").read_text(), rates())
    row = ask(db, "turns", probabilities())[0]
    if not row["later_turns"]:
        return None
    return Turns(
        continued_share=row["later_turns"] / row["requests"],
        new_tokens=dict(zip(NAMES, row["new_tokens"], strict=True)),
        think_s={name: us / 1e6 for name, us in zip(NAMES, row["think_us"], strict=True)},
    )


HISTOGRAMS_SCHEMA = pa.schema(
    [
        pa.field("histogram", pa.string()),  # joint | context | arrivals_per_minute | concurrency_us
        pa.field("by_kind", pa.string()),  # all | region | model
        pa.field("by_value", pa.string()),
        pa.field("x_low", pa.int64()),  # least prompt or context length of the bin, or the minute
        pa.field("x_high", pa.int64()),  # first above it
        pa.field("y_low", pa.int64()),  # least output length of the bin, or the number in flight
        pa.field("y_high", pa.int64()),
        pa.field("weight", pa.int64()),  # requests, or microseconds
    ]
)


def write_histograms(db: duckdb.DuckDBPyConnection, target: Path) -> None:
    """All histograms of the table `requests` as one long Parquet table."""
    close_silences(db)
    rows: list[tuple[Any, ...]] = []
    for row in ask(db, "joint"):
        x, y = bin_edges(row["prompt_bin"]), bin_edges(row["output_bin"])
        rows.append(("joint", row["by_kind"], row["by_value"], *x, *y, row["requests"]))
    for row in ask(db, "context"):
        rows.append(("context", "all", "", *bin_edges(row["context_bin"]), None, None, row["requests"]))
    for row in ask(db, "arrivals"):
        minute = row["minute"]
        rows.append(("arrivals_per_minute", "all", "", minute, minute + 1, None, None, row["requests"]))
    for row in concurrency_rows(db):
        minute, level = row["minute"], row["level"]
        rows.append(("concurrency_us", "all", "", minute, minute + 1, level, level + 1, row["held_us"]))
    columns = [
        pa.array(column, type=field.type)
        for column, field in zip(zip(*rows, strict=True), HISTOGRAMS_SCHEMA, strict=True)
    ]
    with whole(target) as temporary:
        pq.write_table(pa.table(columns, schema=HISTOGRAMS_SCHEMA), temporary, compression="zstd")
