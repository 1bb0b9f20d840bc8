"""How one file is read: which format it has, and the SQL that makes requests of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tideforge.data.logs import Head, printable
from tideforge.data.mapping import NATIVE, Format, known_formats
from tideforge.data.scans import Scan, identifier, parquet_scan, parquet_schema, parts, scan
from tideforge.data.schema import COLUMNS, KEPT, REQUIRED, accepts
from tideforge.data.values import begun, finished, folded, moments_read, quoted, sql_type, values
from tideforge.errors import UserError

JSON_KINDS = ("jsonl", "otlp-json")


@dataclasses.dataclass(frozen=True)
class Plan:
    format: str
    scan: Scan
    columns: dict[str, str]  # kept columns and moments -> SQL over the scan
    times: str
    mapping: Format | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        return self.scan.arguments

    @property
    def missing(self) -> tuple[str, ...]:
        """Declared columns that the file cannot give. An id can always be made."""
        given = {*self.columns, "request_id"}
        given |= {name for name, moment in (("ttft_ms", "first"), ("latency_ms", "end")) if moment in self.columns}
        return tuple(name for name in KEPT if name not in given and name not in REQUIRED)

    def query(self, made_id: str) -> str:
        """SQL of row, broken, passed and every kept column; `made_id` begins the ids of a format that has none."""
        columns = dict(self.columns)
        if self.mapping and "request_id" not in self.mapping.columns:
            columns["request_id"] = f"'{made_id}-' || row"
        shown = "".join(f', {sql} AS "{name}"' for name, sql in columns.items())
        rows = f"SELECT row, broken, {self.passed} AS passed{shown} FROM ({self.scan.query})"
        if self.mapping and self.mapping.merge:
            rows = self.merged(rows)
        names = frozenset(columns)
        made = ", ".join(f"{sql} AS {name}" for name, sql in finished(names).items())
        return f"SELECT row, broken, passed, {made} FROM (SELECT *, {begun(names)} AS begun FROM ({rows}))"

    @property
    def passed(self) -> str:
        """SQL: whether the row is no finished request, as the format says."""
        if self.mapping is None or self.mapping.only is None:
            return "false"
        only = self.mapping.only
        reached = [sql for name in only.origins if (sql := self.scan.reach(name)) is not None]
        like = quoted(only.pattern)
        return f"NOT coalesce(regexp_matches(coalesce({', '.join(reached)}), {like}), false)" if reached else "true"

    def merged(self, rows: str) -> str:
        """One row of those with the same request id, at the place of the first, in the order of the file."""
        assert self.mapping is not None
        folds = ", ".join(f'{folded(self.mapping, name)} AS "{name}"' for name in self.columns if name != "request_id")
        alone = "CASE WHEN broken OR passed OR request_id IS NULL THEN row END"
        return (
            "SELECT min(row) AS row, bool_or(broken) AS broken, bool_or(passed) AS passed, request_id"
            f"{', ' + folds if folds else ''} FROM ({rows}) GROUP BY request_id, {alone} ORDER BY min(row)"
        )


def plan(path: Path, shown: str, head: Head, given: Sequence[Format]) -> Plan:
    """`path` is a plain file, `shown` what messages call it. Given formats are tried first, in order; where some of the
    file's kind are given, none but this project's own Parquet is known besides."""
    if head.kind == "parquet":
        return parquet_plan(path, shown, given)
    chosen = choose(shown, head, given)
    return mapped(chosen, scan(chosen, path, head))


def mapped(chosen: Format, scanned: Scan) -> Plan:
    return Plan(chosen.name, scanned, values(chosen, scanned.reach), moments_read(chosen), chosen)


def choose(shown: str, head: Head, given: Sequence[Format]) -> Format:
    kinds = ("csv",) if head.kind == "csv" else JSON_KINDS
    names = set(head.names)
    if chosen := fitting(kinds, names, given):
        return chosen
    if head.kind == "csv" and head.json_below and (chosen := fitting(JSON_KINDS, set(head.json_below), given)):
        return chosen
    raise unknown(shown, kinds, head.names, given)


def fitting(kinds: Sequence[str], names: set[str], given: Sequence[Format]) -> Format | None:
    """The first given format whose needs are there; where none of these kinds is given, the known one with most needs."""
    ours = [each for each in given if each.kind in kinds]
    known = sorted((each for each in known_formats() if each.kind in kinds), key=lambda each: -len(each.needs))
    return next((each for each in ours or known if needed(each) <= names), None)


def needed(chosen: Format) -> set[str]:
    """Columns or top-level names."""
    return {name if chosen.kind == "csv" else parts(name)[0] for name in chosen.needs}


def unknown(shown: str, kinds: Sequence[str], names: Sequence[str], given: Sequence[Format]) -> UserError:
    ours = [each for each in given if each.kind in kinds]
    formats = "; ".join(
        f"{each.name}: {', '.join(each.needs)}" for each in ours or known_formats() if each.kind in kinds
    )
    which = "given" if ours else "known"
    problem = f"its columns ({printable(', '.join(names)[:200])}) are those of no {which} format"
    return UserError(shown, problem, f"{which} are {formats}{'' if ours else ', or Parquet; or give a mapping file'}")


def parquet_plan(path: Path, shown: str, given: Sequence[Format]) -> Plan:
    """A mapping that was given goes before this project's own columns, a known one behind them."""
    schema = parquet_schema(path, shown)
    ours = any(each.kind == "parquet" for each in given)
    own = set(REQUIRED) <= set(schema.names)
    chosen = fitting(("parquet",), set(schema.names), given) if ours or not own else None
    if chosen is not None:
        return mapped(chosen, scan(chosen, path, Head("parquet")))
    if ours and not own:
        raise unknown(shown, ("parquet",), schema.names, given)
    return native(path, shown, schema)


def native(path: Path, shown: str, schema: pa.Schema) -> Plan:
    """This project's Parquet: required columns are there, every declared column has its type, others are ignored."""
    for column in COLUMNS:
        if column.name not in schema.names:
            if column.required:
                raise UserError(f"{shown}: {column.name}", "the column is missing", f"add it as {column.type}")
        elif not accepts(column, found := schema.field(column.name).type):
            raise UserError(
                f"{shown}: {column.name}", f"has type {printable(str(found))}", f"write it as {column.type}"
            )
    names = [name for name in KEPT if name in schema.names]
    columns = {name: f"TRY_CAST({identifier('of ' + name)} AS {sql_type(name)})" for name in names}
    zone = getattr(schema.field("arrival").type, "tz", None)
    return Plan(
        NATIVE,
        parquet_scan(schema, path, names, lambda name: columns.get(name)),
        columns,
        "absolute" if zone else "written; UTC is assumed where no zone is",
    )
