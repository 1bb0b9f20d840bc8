"""Reads traffic logs of any declared format into the declared schema; bad rows go aside with a reason.

A file that cannot be a traffic log at all (missing, empty, truncated, a column of a wrong type) stops the reading with
a UserError that names file and column. A row that cannot be a finished request is quarantined and counted. Text is never
read. A format without request ids is given `<12 hex digits of the file's SHA-256>-<row>`: a file that is moved, packed
or named twice counts once, and two requests that look alike stay two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tideforge.data.files import disk_full, sha256_file, whole
from tideforge.data.ingest_report import FileReport, IngestReport
from tideforge.data.logs import label, look
from tideforge.data.mapping import Format
from tideforge.data.plan import Plan, plan
from tideforge.data.schema import KEPT, QUARANTINE_SCHEMA, REQUESTS_SCHEMA, REQUIRED
from tideforge.data.staging import Location, compression, plain, valid_text
from tideforge.data.values import quoted, sql_type
from tideforge.errors import UserError

MOST_TOKENS = 100_000_000  # a length above this is a broken log, not a long context
EARLIEST_US, LATEST_US = 946_684_800_000_000, 4_102_444_800_000_000  # 2000-01-01 and 2100-01-01, since the epoch
PASSED = "passed over"
# In order: the first that holds is the row's reason. Conditions are SQL over the declared columns.
RULES: tuple[tuple[str, str], ...] = (
    *((f"{name} is missing or unreadable", f"{name} IS NULL") for name in REQUIRED),
    ("request_id is empty", "request_id = ''"),
    (
        "arrival is out of range",
        f"arrival NOT BETWEEN make_timestamptz({EARLIEST_US}) AND make_timestamptz({LATEST_US})",
    ),
    ("prompt_tokens is not positive", "prompt_tokens <= 0"),
    ("output_tokens is not positive", "output_tokens <= 0"),
    ("tokens are out of range", f"prompt_tokens > {MOST_TOKENS} OR output_tokens > {MOST_TOKENS}"),
    ("cached_tokens is out of range", "cached_tokens < 0 OR cached_tokens > prompt_tokens"),
    ("latency_ms is out of range", "NOT (latency_ms >= 0 AND latency_ms < 1e9)"),
    ("ttft_ms is out of range", "NOT (ttft_ms >= 0 AND ttft_ms < 1e9)"),
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Tables `requests` and `quarantine` of a DuckDB connection, and the account of them."""

    db: duckdb.DuckDBPyConnection
    report: IngestReport

    def write_requests(self, target: Path) -> None:
        write_table(
            self.db, f"SELECT {', '.join(KEPT)} FROM requests ORDER BY arrival, request_id", REQUESTS_SCHEMA, target
        )

    def write_quarantine(self, target: Path) -> None:
        columns = ", ".join(QUARANTINE_SCHEMA.names)
        write_table(
            self.db, f"SELECT {columns} FROM quarantine ORDER BY file, file_rank, row", QUARANTINE_SCHEMA, target
        )


def connect() -> duckdb.DuckDBPyConnection:
    """In memory, in UTC, never looking for extensions."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": tempfile.gettempdir(),
        "autoinstall_known_extensions": "false",
    }
    db = duckdb.connect(":memory:", config=settings)
    db.execute("SET TimeZone = 'UTC'")
    return db


def read_logs(locations: Sequence[Location], formats: Sequence[Format] = ()) -> Reading:
    """`formats` are tried before the known ones. What is kept does not depend on the files' names or order."""
    if not locations:
        raise UserError("traffic log", "has no rows", "give a log with requests in it")
    db = connect()
    make_raw(db)
    with room():
        files = account(db, [load(db, number, location, formats) for number, location in enumerate(locations)])
        if not sum(file.rows for file in files):
            raise UserError(str(locations[0]), "has no rows", "give a log with requests in it")
        return Reading(db, classify(db, files))


def make_raw(db: duckdb.DuckDBPyConnection) -> None:
    """The empty table that `load` appends to."""
    declared = ", ".join(f"{name} {sql_type(name)}" for name in KEPT)
    db.execute(f"CREATE TABLE raw (file_no INTEGER, row BIGINT, reason VARCHAR, {declared})")


@contextlib.contextmanager
def room() -> Iterator[None]:
    """Memory or disk that is used up is no fault of the log's."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise UserError("traffic log", "needs more memory than there is", "read fewer files or free memory") from None
    except duckdb.IOException as error:
        if "No space left" in str(error):
            raise disk_full(Path(tempfile.gettempdir())) from None
        raise


def head(location: Location, formats: Sequence[Format] = ()) -> None:
    """UserError where the file's head already shows that it cannot be read. What is packed or elsewhere is not copied."""
    seen = look(location)
    if seen.kind == "parquet" and isinstance(location, Path) and not compression(location):
        plan(location, str(location), seen, formats)
    elif seen.kind != "parquet":
        plan(Path(location.name), str(location), seen, formats)


def load(db: duckdb.DuckDBPyConnection, number: int, location: Location, formats: Sequence[Format]) -> FileReport:
    """Appends one file to `raw`; counts are filled in by `account`."""
    seen = look(location)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(plain(location))
        digest = sha256_file(path)
        if seen.marked and seen.kind == "json":
            path = stack.enter_context(valid_text(path))
        made = plan(path, str(location), seen, formats)
        try:
            insert(db, number, digest, made)
        except duckdb.Error as error:
            if isinstance(error, duckdb.OutOfMemoryException) or "No space left" in str(error):
                raise
            if seen.kind == "parquet":
                raise unreadable(location, made, error) from None
            path = stack.enter_context(valid_text(path))  # a bad byte anywhere fails the whole file
            made = plan(path, str(location), seen, formats)
            try:
                insert(db, number, digest, made)
            except duckdb.Error as again:
                raise unreadable(location, made, again) from None
    return FileReport(
        name=label(location), sha256=digest, format=made.format, rows=0, missing=made.missing, times=made.times
    )


def unreadable(location: Location, made: Plan, error: duckdb.Error) -> UserError:
    kind = str(error).splitlines()[0].partition(":")[0]  # no more: the rest may quote the log
    return UserError(str(location), f"cannot be read as {made.format} ({kind})", "write the file again")


def insert(db: duckdb.DuckDBPyConnection, number: int, digest: str, made: Plan) -> None:
    cases = " ".join(f"WHEN {condition} THEN {quoted(reason)}" for reason, condition in RULES)
    reason = f"CASE WHEN broken THEN 'the line is broken' WHEN passed THEN '{PASSED}' {cases} END"
    db.execute(
        f"INSERT INTO raw SELECT {number}, row, {reason}, {', '.join(KEPT)} FROM ({made.query(digest[:12])})",
        list(made.arguments),
    )


def account(db: duckdb.DuckDBPyConnection, files: Sequence[FileReport]) -> tuple[FileReport, ...]:
    """The files with their counts, in their order.

    Rows that were appended in the file's order are looked at in that order: DuckDB streams `lag` over a table.
    """
    rows = db.execute(
        f"SELECT file_no, count(*) FILTER (reason IS DISTINCT FROM '{PASSED}'), count(*) FILTER (reason = '{PASSED}') "
        "FROM raw GROUP BY file_no"
    ).fetchall()
    steps = db.execute(
        "SELECT file_no, count(*), max(back) FROM (SELECT file_no, lag(file_no) OVER () = file_no AS same, "
        "least(lag(begun) OVER () - begun, lag(ended) OVER () - ended) AS back FROM ("
        "SELECT file_no, epoch_us(arrival) AS begun, epoch_us(arrival) + coalesce(latency_ms, 0) * 1000 AS ended "
        "FROM raw WHERE reason IS NULL)) WHERE same AND back > 0 GROUP BY file_no"
    ).fetchall()
    counts = {number: {"rows": good, "passed_over": passed} for number, good, passed in rows}
    backs = {number: {"steps_back": times, "largest_step_back_s": most / 1e6} for number, times, most in steps}
    return tuple(
        file.model_copy(update=counts.get(number, {}) | backs.get(number, {})) for number, file in enumerate(files)
    )


def classify(db: duckdb.DuckDBPyConnection, files: tuple[FileReport, ...]) -> IngestReport:
    """Splits `raw` into `requests` (first of each id) and `quarantine`, and drops it."""
    order = {digest: place for place, digest in enumerate(sorted({file.sha256 for file in files}))}
    ranks = [order[file.sha256] for file in files]
    rank, names = f"{ranks}[file_no + 1]", f"[{', '.join(quoted(file.name) for file in files)}][file_no + 1]"
    columns = f"{', '.join(KEPT)}, row, {rank} AS file_rank"
    first = "row_number() OVER (PARTITION BY request_id ORDER BY arrival, prompt_tokens, output_tokens, file_rank, row)"
    db.execute(
        "CREATE TEMP TABLE twice AS SELECT request_id FROM raw WHERE reason IS NULL GROUP BY ALL HAVING count(*) > 1"
    )
    db.execute(
        f"CREATE TABLE requests AS SELECT {columns} FROM raw WHERE reason IS NULL "
        "AND request_id NOT IN (SELECT request_id FROM twice) UNION ALL "
        f"SELECT * FROM (SELECT {columns} FROM raw WHERE reason IS NULL AND request_id IN (FROM twice)) QUALIFY {first} = 1"
    )
    db.execute(
        f"CREATE TABLE quarantine AS SELECT {columns}, reason, {names} AS file FROM raw WHERE reason != '{PASSED}'"
    )
    db.execute("DROP TABLE twice")
    db.execute("DROP TABLE raw")
    reasons = db.execute("SELECT reason, count(*) FROM quarantine GROUP BY reason ORDER BY reason").fetchall()
    times = db.execute("SELECT min(arrival)::VARCHAR, max(arrival)::VARCHAR, count(*) FROM requests").fetchall()[0]
    rows, bad = sum(file.rows for file in files), sum(number for _, number in reasons)
    return IngestReport(
        files=tuple(sorted(files, key=lambda file: (file.sha256, file.name))), rows=rows, kept=times[2],
        duplicates=rows - times[2] - bad, quarantined=dict(reasons), first_arrival=times[0], last_arrival=times[1],
    )  # fmt: skip


def write_table(db: duckdb.DuckDBPyConnection, query: str, schema: pa.Schema, target: Path) -> None:
    """Streams a query into Parquet under the declared schema, so that equal rows make equal bytes."""
    reader = db.sql(query).to_arrow_reader(100_000)
    with whole(target) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
