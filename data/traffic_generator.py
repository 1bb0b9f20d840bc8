"""Synthetic traffic logs of any size whose lengths are real: each request takes the prompt and output length of a random row
of the public traces in data/samples/. Made up are everything else: the day's curve, regions, models, tenants, times, cached
prefixes and duplicates. Same seed, same rows. Ids are unique but for duplicates, which are known in number.
"""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from tideforge.data.files import whole
from tideforge.data.logs import sample_path
from tideforge.data.values import quoted

TRACES = ("azure_conv_2023", "azure_code_2023", "mooncake_conversation")
FIRST_DAY = datetime.date(2026, 1, 1)
# Requests with odd numbers only are duplicates, of one at an odd distance: so no duplicate is another's original.
NEAR = 7  # places back in the same file
ROWS = """
WITH numbered AS (
    SELECT i, i - {first} AS place, (hash(i, {seed}) >> 1)::BIGINT AS h,
           (hash(i, {seed}, 1) >> 1)::BIGINT AS g
    FROM range({first}, {first} + {rows}) t(i)
),
drawn AS (
    SELECT *, (h % 10000) / 1e4 AS u, (g % 10000) / 1e4 AS v,
           ({place_share}) AS x,
           CASE WHEN i % 2 = 0 THEN i
                WHEN g // 10000 % 100 = 0 AND place >= {near} THEN i - {near}
                WHEN g // 10000 % 200 = 1 AND i >= {rows} THEN i - {rows}
                ELSE i END AS original
    FROM numbered
)
SELECT printf('%016x%08x', (hash(original, {seed}, 3) >> 1)::BIGINT, (hash(original, {seed}, 2) & 4294967295)::BIGINT)
           || printf('%08x', original) AS request_id,
       make_timestamptz({midnight} + (86400e6 * (x - 0.1 * sin(2 * pi() * x)))::BIGINT) AS arrival,
       prompt_tokens, output_tokens,
       (16 * floor(prompt_tokens * v * (h // 10000 % 2) / 16))::BIGINT AS cached_tokens,
       round(prompt_tokens * 0.25 * (0.5 + u), 1) AS ttft_ms,
       round(prompt_tokens * 0.25 * (0.5 + u) + output_tokens * 30 * (0.7 + 0.6 * v), 1) AS latency_ms,
       ['large', 'small'][1 + h // 100000 % 2] AS model,
       ['eu', 'us', 'asia'][1 + h // 1000000 % 3] AS region,
       'tenant-' || (floor(20 * u * u))::BIGINT AS tenant
FROM drawn JOIN trace ON trace.number = h // 10000000 % {traces}
ORDER BY i
"""


@dataclasses.dataclass(frozen=True)
class Traffic:
    rows_a_day: int  # odd
    seed: int = 0

    def day(self, number: int) -> str:
        return (FIRST_DAY + datetime.timedelta(days=number)).isoformat()

    def write_day(self, db: duckdb.DuckDBPyConnection, number: int, target: Path) -> None:
        """One day's log, in the order of the requests' numbers, which is nearly that of arrival."""
        traces = make_trace(db)
        midnight = int(datetime.datetime.fromisoformat(self.day(number) + "T00:00:00+00:00").timestamp()) * 1_000_000
        query = ROWS.format(
            first=number * self.rows_a_day, rows=self.rows_a_day, seed=self.seed, near=NEAR, midnight=midnight,
            traces=traces, place_share=f"least((place + h % 20 * (h // 20 % 50) / 50.0) / ({self.rows_a_day} + 20), 0.999999)",
        )  # fmt: skip
        with whole(target) as temporary:
            db.execute(f"COPY ({query}) TO {quoted(str(temporary))} (FORMAT parquet, COMPRESSION zstd)")

    def duplicates(self, db: duckdb.DuckDBPyConnection, days: int) -> int:
        """How many of the requests of the first days are duplicates, by the generator's own rule."""
        count = 0
        for number in range(days):
            first = number * self.rows_a_day
            count += db.execute(
                f"SELECT count(*) FROM (SELECT i, (hash(i, {self.seed}, 1) >> 1)::BIGINT // 10000 AS g FROM range({first}, "
                f"{first + self.rows_a_day}) t(i)) WHERE i % 2 = 1 AND ((g % 100 = 0 AND i - {first} >= {NEAR}) OR "
                f"(g % 200 = 1 AND i >= {self.rows_a_day}))"
            ).fetchall()[0][0]
        return count


def make_trace(db: duckdb.DuckDBPyConnection) -> int:
    """Table `trace` of numbered real lengths; how many."""
    paths = ", ".join(quoted(str(sample_path(name))) for name in TRACES)
    db.execute(
        "CREATE OR REPLACE TEMP TABLE trace AS SELECT row_number() OVER () - 1 AS number, prompt_tokens, output_tokens FROM "
        f"(SELECT prompt_tokens, output_tokens FROM read_parquet([{paths}]) ORDER BY ALL)"
    )
    return int(db.execute("SELECT count(*) FROM trace").fetchall()[0][0])


def write_conversations(db: duckdb.DuckDBPyConnection, rows: int, target: Path) -> None:
    """Copies of the Mooncake trace, an hour apart, each with blocks of its own: real sharing within a copy, none between."""
    path = sample_path("mooncake_conversation")
    copies, source = rows // pq.read_metadata(path).num_rows + 1, quoted(str(path))
    with whole(target) as temporary:
        db.execute(
            "COPY (SELECT copy || '-' || request_id AS request_id, arrival + to_hours(copy::INTEGER) AS arrival, "
            "prompt_tokens, output_tokens, "
            "list_transform(prefix_hashes, lambda b: b + copy::UBIGINT * 1000000) AS prefix_hashes "
            f"FROM range({copies}) t(copy), read_parquet({source}) t2 ORDER BY copy, t2.arrival, t2.request_id LIMIT {rows}) "
            f"TO {quoted(str(temporary))} (FORMAT parquet, COMPRESSION zstd)"
        )
