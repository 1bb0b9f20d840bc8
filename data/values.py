"""SQL of the declared columns from texts that a scan reaches. What cannot be read is NULL and lands in quarantine."""

from __future__ import annotations

from collections.abc import Callable

from tideforge.data.mapping import MICROS, MOMENTS, Format, Source
from tideforge.data.schema import BY_NAME, KEPT

SQL_TYPES = {
    "int64": "BIGINT", "double": "DOUBLE", "string": "VARCHAR",
    "timestamp[us, tz=UTC]": "TIMESTAMPTZ", "list<item: uint64>": "UBIGINT[]",
}  # fmt: skip
FAR_US = 1e17  # from the epoch: beyond every arrival that is in range, within what DuckDB can hold
WITH_ZONE = r":.*([zZ]| ?UTC|[+-]\d\d(:?\d\d)?)$"
Reach = Callable[[str], str | None]  # a name of the file -> SQL of its text, None where the file has no such name


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def sql_type(name: str) -> str:
    return SQL_TYPES[str(BY_NAME[name].type)]


def values(chosen: Format, reach: Reach) -> dict[str, str]:
    """SQL of every kept column that the file can give, moments among them as MOMENTS name them."""
    made = {}
    for name, source in chosen.columns.items():
        reached = [sql for origin in source.origins if (sql := reach(origin)) is not None]
        if reached:
            text = matched(f"coalesce({', '.join(reached)})" if len(reached) > 1 else reached[0], source.pattern)
            made[name] = moment(text, source, chosen) if name in MOMENTS else value(name, text, source)
    return made


def matched(text: str, pattern: str | None) -> str:
    if pattern is None:
        return text
    like = quoted(pattern)
    return f"CASE WHEN regexp_matches({text}, {like}) THEN regexp_extract({text}, {like}, 1) END"


def value(name: str, text: str, source: Source) -> str:
    kind = sql_type(name)
    if source.unit == "items":
        return f"CAST(CASE WHEN trim({text}, ' []') = '' THEN 0 ELSE len(string_split({text}, ',')) END AS {kind})"
    factor = source.scale * (MICROS[source.unit] / 1e3 if source.unit in MICROS else 1)
    if kind in ("BIGINT", "DOUBLE") and factor != 1:
        return f"TRY_CAST(TRY_CAST({text} AS DOUBLE) * {factor!r} AS {kind})"
    if kind == "VARCHAR":
        return text if name == "request_id" else f"nullif({text}, '')"
    return f"TRY_CAST({text} AS {kind})"


def moment(text: str, source: Source, chosen: Format) -> str:
    """A number counts from the format's epoch; a written time without a zone is in the format's time zone."""
    if source.unit in MICROS:
        micros = f"TRY_CAST({text} AS DOUBLE) * {MICROS[source.unit]!r} + {chosen.epoch_us}"
        near = f"CAST(round(least(greatest({micros}, -{FAR_US!r}), {FAR_US!r})) AS BIGINT)"
        return f"CASE WHEN TRY_CAST({text} AS DOUBLE) IS NOT NULL THEN make_timestamptz({near}) END"
    text = f"replace({text}, ',', '.')"  # Python's logging writes milliseconds behind a comma
    with_zone = f"TRY_CAST({text} AS TIMESTAMPTZ)"  # the connection is in UTC
    if chosen.time_zone == "UTC":
        return with_zone
    without = f"TRY_CAST({text} AS TIMESTAMP) AT TIME ZONE {quoted(chosen.time_zone)}"
    return f"CASE WHEN regexp_matches({text}, {quoted(WITH_ZONE)}) THEN {with_zone} ELSE {without} END"


def folded(chosen: Format, name: str) -> str:
    """SQL that makes one value of those that several lines of a request give for a column."""
    if name == "arrival":
        return "min(arrival)"
    if name in MOMENTS:
        return f'max("{name}")'
    if chosen.columns[name].fold == "sum":
        return f"CAST(sum({name}) AS {sql_type(name)})"
    return f"arg_min({name}, row)"


def finished(names: frozenset[str]) -> dict[str, str]:
    """SQL of every kept column over a subquery that has `names`: what one moment or duration tells of another."""
    made = {name: name if name in names else f"CAST(NULL AS {sql_type(name)})" for name in KEPT}
    lasting = "(epoch_us({}) - epoch_us(begun)) / 1000.0"
    for column, name in (("ttft_ms", "first"), ("latency_ms", "end")):
        if name in names:
            told = lasting.format(f'"{name}"')
            made[column] = f"coalesce({column}, {told})" if column in names else told
    made["arrival"] = "begun"
    return made


def begun(names: frozenset[str]) -> str:
    """SQL of the arrival: as the file gives it, or as long before the end as the request took."""
    if not {"end", "latency_ms"} <= names:
        return "arrival"
    sane = "CASE WHEN latency_ms >= 0 AND latency_ms < 1e9 THEN latency_ms END"
    back = f'make_timestamptz(epoch_us("end") - CAST(round({sane} * 1000) AS BIGINT))'
    return f"coalesce(arrival, {back})" if "arrival" in names else back


def moments_read(chosen: Format) -> str:
    """In words, for the report: how times are understood."""
    units = {source.unit for name, source in chosen.columns.items() if name in MOMENTS}
    if chosen.epoch is not None:
        return f"relative, counted from {chosen.epoch:%Y-%m-%d %H:%M}: hours of the day and weekdays mean nothing"
    return f"written; {chosen.time_zone} is assumed where no zone is" if "text" in units else "absolute"
