"""The declared schema of a finished request: one row of a traffic log."""

from __future__ import annotations

import dataclasses

import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    type: pa.DataType
    required: bool = False  # required: there in every file and never null in a row that is kept
    text: bool = False  # what a user wrote or read: leaves the log only where an endpoint keeps text


COLUMNS = (
    Column("request_id", pa.string(), required=True),
    Column("arrival", pa.timestamp("us", tz="UTC"), required=True),
    Column("prompt_tokens", pa.int64(), required=True),
    Column("output_tokens", pa.int64(), required=True),
    Column("cached_tokens", pa.int64()),  # of the prompt, served from the prefix cache
    Column("ttft_ms", pa.float64()),
    Column("latency_ms", pa.float64()),  # arrival to last token
    Column("model", pa.string()),
    Column("region", pa.string()),
    Column("tenant", pa.string()),
    Column("prefix_hashes", pa.list_(pa.uint64())),  # one a full block of the prompt, in order
    Column("finish_reason", pa.string()),  # stop | length | abort
    Column("prompt_text", pa.string(), text=True),
    Column("output_text", pa.string(), text=True),
)
BY_NAME = {column.name: column for column in COLUMNS}
REQUIRED = tuple(column.name for column in COLUMNS if column.required)
TEXT = tuple(column.name for column in COLUMNS if column.text)
KEPT = tuple(column.name for column in COLUMNS if not column.text)  # what ingest hands on

LOG_SCHEMA = pa.schema([pa.field(column.name, column.type, nullable=not column.required) for column in COLUMNS])
REQUESTS_SCHEMA = pa.schema([LOG_SCHEMA.field(name) for name in KEPT])
QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("reason", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),  # its name, behind the partitions that it lies in
        pa.field("row", pa.int64(), nullable=False),  # from 0, the header not counted
        *(pa.field(name, BY_NAME[name].type) for name in REQUIRED),
    ]
)


def accepts(column: Column, found: pa.DataType) -> bool:
    """Whether a Parquet column of type `found` can be read as the declared one without guessing."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_null(found):
        return not column.required
    if pa.types.is_integer(column.type):
        return bool(pa.types.is_integer(found))
    if pa.types.is_floating(column.type):
        return bool(pa.types.is_floating(found) or pa.types.is_integer(found))
    if pa.types.is_string(column.type):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
    if pa.types.is_timestamp(column.type):
        return bool(pa.types.is_timestamp(found))
    return bool((pa.types.is_list(found) or pa.types.is_large_list(found)) and pa.types.is_integer(found.value_type))
