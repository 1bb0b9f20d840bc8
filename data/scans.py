"""How each kind of file is scanned: SQL that yields its rows, and how a name of the file is reached in them.

Every scan yields `row` (from 0, in the file's order), `broken` (the line cannot be taken apart) and what `reach` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tideforge.data.logs import Head, printable
from tideforge.data.mapping import Format
from tideforge.data.values import Reach, quoted
from tideforge.errors import UserError

LONGEST_LINE = 64 << 20  # bytes of a JSON line; a whole JSON document may be longer
LONGEST_DOCUMENT = 1 << 30
ATTRIBUTE_TYPES = ("intValue", "stringValue", "doubleValue", "boolValue", "arrayValue/values/0/stringValue")


@dataclasses.dataclass(frozen=True)
class Scan:
    query: str
    arguments: tuple[object, ...]
    reach: Reach


def scan(chosen: Format, path: Path, head: Head) -> Scan:
    return SCANS[chosen.kind](chosen, path, head)


def origins(chosen: Format) -> list[str]:
    """Every name of the file that the mapping mentions, once."""
    sources: list[Sequence[str]] = [source.origins for source in chosen.columns.values()]
    if chosen.only:
        sources.append(chosen.only.origins)
    return list(dict.fromkeys(name for names in sources for name in names))


def scan_csv(chosen: Format, path: Path, head: Head) -> Scan:
    """Line by line, so that an open quote or a wrong number of fields breaks its own line and no other."""
    lines = (
        "SELECT line, row_number() OVER () - 2 AS row FROM read_csv(?, delim = '\x01\x02\x03\x04', quote = '', escape = '', "
        "compression = 'none', header = false, auto_detect = false, columns = {line: 'VARCHAR'})"
    )
    query = (
        f"SELECT fields, row, len(fields) != {len(head.names)} OR contains(line, chr(34)) AS broken FROM ("
        "SELECT line, row, string_split(line, ',') AS fields FROM ("
        "SELECT row, regexp_replace(line, '\"([^\",]*)\"', '\\1', 'g') AS line "
        f"FROM ({lines}) WHERE row >= 0 AND trim(line) != ''))"
    )

    def reach(name: str) -> str | None:
        return f"trim(fields[{head.names.index(name) + 1}])" if name in head.names else None

    return Scan(query, (str(path),), reach)


def objects(head: Head) -> str:
    """A table of JSON values, NULL for a line that is none."""
    if head.layout == "lines":
        layout = f"format = 'newline_delimited', ignore_errors = true, maximum_object_size = {LONGEST_LINE}"
    else:
        layout = f"format = '{head.layout}', maximum_object_size = {LONGEST_DOCUMENT}"
    return f"SELECT json FROM read_json_objects(?, compression = 'none', {layout})"


def extracted(column: str, names: list[str]) -> tuple[str, Callable[[str], str]]:
    """SQL that takes all names out of a JSON column at one reading, and where each then is."""
    pointers = ", ".join(quoted("/" + name) for name in names)
    return f"json_extract_string({column}, [{pointers}]) AS v", lambda name: f"v[{names.index(name) + 1}]"


def scan_jsonl(chosen: Format, path: Path, head: Head) -> Scan:
    taken, reach = extracted("json", origins(chosen))
    query = (
        f"SELECT {taken}, row, json IS NULL OR json_type(json) != 'OBJECT' AS broken "
        f"FROM (SELECT json, row_number() OVER () - 1 AS row FROM ({objects(head)}))"
    )
    return Scan(query, (str(path),), reach)


def scan_otlp(chosen: Format, path: Path, head: Head) -> Scan:
    """A row a span; a line that is no JSON is a broken row."""
    fields = [name for name in origins(chosen) if not name.startswith(("attributes/", "resource/"))] or ["spanId"]
    taken, reach_field = extracted("span", fields)
    spans = (
        f"WITH lines AS MATERIALIZED ({objects(head)}), "
        "resources AS (SELECT unnest(json_extract(json, '$.resourceSpans[*]')) AS held FROM lines WHERE json IS NOT NULL), "
        "scopes AS (SELECT unnest(json_extract(held, '$.scopeSpans[*]')) AS scope, "
        "json_extract(held, '$.resource.attributes[*]') AS resource FROM resources), "
        "spans AS (SELECT unnest(json_extract(scope, '$.spans[*]')) AS span, resource FROM scopes) "
        f"SELECT {taken}, json_extract(span, '$.attributes[*]') AS attributes, resource, broken, "
        "row_number() OVER () - 1 AS row FROM (SELECT span, resource, false AS broken FROM spans UNION ALL "
        "SELECT NULL, NULL, true FROM lines WHERE json IS NULL)"
    )

    def reach(name: str) -> str:
        where, _, key = name.partition("/")
        return attribute(where, key) if where in ("attributes", "resource") and key else reach_field(name)

    return Scan(spans, (str(path),), reach)


def attribute(column: str, key: str) -> str:
    """The value of one key in a list of OTLP's {key, value: {intValue | stringValue | ...}}."""
    named = f"list_filter({column}, lambda a: json_extract_string(a, '/key') = {quoted(key)})[1]"
    tries = ", ".join(quoted(f"/value/{kind}") for kind in ATTRIBUTE_TYPES)
    return f"list_filter(json_extract_string({named}, [{tries}]), lambda a: a IS NOT NULL)[1]"


def scan_parquet(chosen: Format, path: Path, head: Head) -> Scan:
    schema = parquet_schema(path, str(path))
    return parquet_scan(schema, path, origins(chosen), lambda name: reach_parquet(schema, name))


def parquet_scan(schema: pa.Schema, path: Path, names: Sequence[str], reach: Reach) -> Scan:
    """Reads only the columns that `names` begin with, under other names: a file may have a column `row` of its own."""
    first = dict.fromkeys(parts(name)[0] for name in names)
    columns = "".join(f"{identifier(name)} AS {identifier('of ' + name)}, " for name in first if name in schema.names)
    query = f"SELECT {columns}file_row_number AS row, false AS broken FROM read_parquet(?, file_row_number = true)"
    return Scan(query, (str(path),), reach)


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def parts(name: str) -> list[str]:
    return [part.replace("~1", "/") for part in name.split("/")]


def parquet_schema(path: Path, shown: str) -> pa.Schema:
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(shown, f"is truncated or damaged Parquet ({reason})", "write the file again") from None
    if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
        raise UserError(f"{shown}: {printable(twice)}", "stands for two columns", "name each column once")
    return schema


def reach_parquet(schema: pa.Schema, name: str) -> str | None:
    """Through structs, maps and JSON text; None where a column or a field of a struct is not there."""
    first, *below = parts(name)
    if first not in schema.names:
        return None
    sql, kind = identifier("of " + first), schema.field(first).type
    for place, part in enumerate(below):
        if pa.types.is_struct(kind):
            if kind.get_field_index(part) < 0:
                return None
            sql, kind = f"struct_extract({sql}, {quoted(part)})", kind.field(part).type
        elif pa.types.is_map(kind):
            sql, kind = f"map_extract({sql}, {quoted(part)})[1]", kind.item_type
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            pointer = "/".join(["", *(each.replace("/", "~1") for each in below[place:])])
            return f"CASE WHEN json_valid({sql}) THEN json_extract_string({sql}, {quoted(pointer)}) END"
        else:
            return None
    return f"CAST({sql} AS VARCHAR)"


SCANS = {"parquet": scan_parquet, "csv": scan_csv, "jsonl": scan_jsonl, "otlp-json": scan_otlp}
