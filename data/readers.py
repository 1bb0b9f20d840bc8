"""Reads traffic logs of any known format into the declared schema; bad rows go aside with a reason.

A file that cannot be a traffic log at all (missing, empty, truncated, a column of a wrong type) stops the reading with
a UserError that names file and column. A row that cannot be a finished request is quarantined and counted.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from tideforge.data.files import sha256_file, whole
from tideforge.data.formats import FORMATS, NATIVE, Format
from tideforge.data.logs import look
from tideforge.data.schema import BY_NAME, COLUMNS, KEPT, QUARANTINE_SCHEMA, REQUESTS_SCHEMA, REQUIRED, accepts
from tideforge.errors import UserError

MOST_TOKENS = 100_000_000  # a length above this is a broken log, not a long context
EARLIEST_US, LATEST_US = 946_684_800_000_000, 4_102_444_800_000_000  # 2000-01-01 and 2100-01-01, since the epoch
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
SQL_TYPES = {
    "int64": "BIGINT", "double": "DOUBLE", "string": "VARCHAR",
    "timestamp[us, tz=UTC]": "TIMESTAMPTZ", "list<item: uint64>": "UBIGINT[]",
}  # fmt: skip


class FileReport(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    sha256: str
    format: str
    rows: int


class IngestReport(BaseModel):
    """What became of every row: rows = kept + duplicates + the sum of quarantined."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: int = 1
    files: tuple[FileReport, ...]
    rows: int
    kept: int
    duplicates: int
    quarantined: dict[str, int]
    first_arrival: str | None
    last_arrival: str | None


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
        write_table(self.db, f"SELECT {columns} FROM quarantine ORDER BY file, row", QUARANTINE_SCHEMA, target)


def connect() -> duckdb.DuckDBPyConnection:
    """In memory, in UTC, never looking for extensions."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": tempfile.gettempdir(),
        "autoinstall_known_extensions": "false",
    }
    db = duckdb.connect(":memory:", config=settings)
    db.execute("SET TimeZone = 'UTC'")
    return db


def read_logs(paths: Sequence[Path]) -> Reading:
    """Reads the files in the order of their content's hash, so that the result does not depend on names."""
    db = connect()
    declared = ", ".join(f"{name} {SQL_TYPES[str(BY_NAME[name].type)]}" for name in KEPT)
    db.execute(f"CREATE TABLE raw (file VARCHAR, file_hash VARCHAR, row BIGINT, broken BOOLEAN, {declared})")
    hashed = sorted((sha256_file(existing(path)), path) for path in paths)
    files = tuple(load(db, path, digest) for digest, path in hashed)
    if not sum(file.rows for file in files):
        raise UserError(str(hashed[0][1]) if hashed else "traffic log", "has no rows", "give a log with requests in it")
    return Reading(db, classify(db, files))


def existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(str(path), "does not exist", "give files, folders or globs of traffic logs")
    return path


def head(path: Path) -> tuple[Format, list[str]]:
    """The format and, of text, the column names, from the file's head (Parquet: its schema). UserError when it has none."""
    kind, names = look(path)
    return (native(path) if kind == "parquet" else known(path, kind, names)), names


def load(db: duckdb.DuckDBPyConnection, path: Path, digest: str) -> FileReport:
    """Appends one file to `raw`."""
    chosen, names = head(path)
    before = count(db, "SELECT count(*) FROM raw")
    values = ", ".join(
        f"CAST({chosen.columns.get(name, 'NULL')} AS {SQL_TYPES[str(BY_NAME[name].type)]}) AS {name}" for name in KEPT
    )
    scan, arguments = SCANS[chosen.kind](chosen, path, names)
    try:
        db.execute(
            f"INSERT INTO raw SELECT ?, file_hash, row, broken, {values} FROM (SELECT *, ? AS file_hash FROM ({scan}))",
            [path.name, digest[:12], *arguments],
        )
    except duckdb.Error as error:
        line = str(error).splitlines()[0]
        raise UserError(str(path), f"cannot be read as {chosen.name} ({line})", "write the file again") from None
    rows = count(db, "SELECT count(*) FROM raw") - before
    return FileReport(name=path.name, sha256=digest, format=chosen.name, rows=rows)


def native(path: Path) -> Format:
    """This project's Parquet: required columns are there, every declared column has its type, others are ignored."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(str(path), f"is truncated or damaged Parquet ({reason})", "write the file again") from None
    for column in COLUMNS:
        if column.name not in schema.names:
            if column.required:
                raise UserError(f"{path}: {column.name}", "the column is missing", f"add it as {column.type}")
        elif not accepts(column, found := schema.field(column.name).type):
            raise UserError(f"{path}: {column.name}", f"has type {found}", f"write it as {column.type}")
    columns = {
        name: f'TRY_CAST("{name}" AS {SQL_TYPES[str(BY_NAME[name].type)]})' for name in KEPT if name in schema.names
    }
    return Format(NATIVE, "parquet", {}, columns)


def known(path: Path, kind: str, names: list[str]) -> Format:
    for candidate in FORMATS:
        if candidate.kind == kind and set(candidate.source) <= set(names):
            return candidate
    formats = "; ".join(f"{each.name}: {', '.join(each.source)}" for each in FORMATS if each.kind == kind)
    shown = ", ".join(names)[:200]
    raise UserError(
        str(path), f"its columns ({shown}) are those of no known format", f"known are {formats}, or Parquet"
    )


def scan_parquet(_: Format, path: Path, names: list[str]) -> tuple[str, list[object]]:
    query = "SELECT *, file_row_number AS row, false AS broken FROM read_parquet(?, file_row_number = true)"
    return query, [str(path)]


def scan_csv(chosen: Format, path: Path, names: list[str]) -> tuple[str, list[object]]:
    """Line by line, so that an open quote or a wrong number of fields breaks its own line and no other."""
    fields = ", ".join(f'trim(fields[{names.index(name) + 1}]) AS "{name}"' for name in chosen.source)
    lines = (
        "SELECT line, row_number() OVER () - 2 AS row FROM read_csv(?, delim = '\x01\x02\x03\x04', quote = '', escape = '', "
        "header = false, auto_detect = false, columns = {line: 'VARCHAR'})"
    )
    query = (
        f"SELECT {fields}, row, len(fields) != {len(names)} OR contains(line, chr(34)) AS broken FROM ("
        "SELECT line, row, string_split(line, ',') AS fields FROM ("
        "SELECT row, regexp_replace(line, '\"([^\",]*)\"', '\\1', 'g') AS line "
        f"FROM ({lines}) WHERE row >= 0 AND trim(line) != ''))"
    )
    return query, [str(path)]


def scan_jsonl(chosen: Format, path: Path, _: list[str]) -> tuple[str, list[object]]:
    columns = "{" + ", ".join(f"{quoted(name)}: {quoted(kind)}" for name, kind in chosen.source.items()) + "}"
    return (
        "SELECT *, row_number() OVER () - 1 AS row, false AS broken FROM "
        f"read_json(?, format = 'newline_delimited', ignore_errors = true, columns = {columns})",
        [str(path)],
    )


SCANS = {"parquet": scan_parquet, "csv": scan_csv, "jsonl": scan_jsonl}


def quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


def classify(db: duckdb.DuckDBPyConnection, files: tuple[FileReport, ...]) -> IngestReport:
    """Splits `raw` into `requests` (first of each id) and `quarantine`, and drops it."""
    cases = " ".join(f"WHEN {condition} THEN '{reason}'" for reason, condition in RULES)
    db.execute(
        f"CREATE TABLE judged AS SELECT *, CASE WHEN broken THEN 'the line is broken' {cases} END AS reason FROM raw"
    )
    db.execute(
        "CREATE TABLE requests AS SELECT * EXCLUDE (reason, broken, file) FROM judged WHERE reason IS NULL QUALIFY "
        "row_number() OVER (PARTITION BY request_id ORDER BY arrival, prompt_tokens, output_tokens, file_hash, row) = 1"
    )
    db.execute("CREATE TABLE quarantine AS SELECT * FROM judged WHERE reason IS NOT NULL")
    reasons = db.execute("SELECT reason, count(*) FROM quarantine GROUP BY reason ORDER BY reason").fetchall()
    rows, kept = count(db, "SELECT count(*) FROM judged"), count(db, "SELECT count(*) FROM requests")
    times = db.execute("SELECT min(arrival)::VARCHAR, max(arrival)::VARCHAR FROM requests").fetchall()[0]
    db.execute("DROP TABLE raw")
    db.execute("DROP TABLE judged")
    bad = sum(number for _, number in reasons)
    return IngestReport(
        files=files, rows=rows, kept=kept, duplicates=rows - kept - bad, quarantined=dict(reasons),
        first_arrival=times[0], last_arrival=times[1],
    )  # fmt: skip


def count(db: duckdb.DuckDBPyConnection, query: str) -> int:
    return int(db.execute(query).fetchall()[0][0])


def write_table(db: duckdb.DuckDBPyConnection, query: str, schema: pa.Schema, target: Path) -> None:
    """Streams a query into Parquet under the declared schema, so that equal rows make equal bytes."""
    reader = db.sql(query).to_arrow_reader(100_000)
    with whole(target) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
