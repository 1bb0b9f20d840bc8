"""Known log formats, each a declared mapping: how to know it by its columns, and an SQL expression a declared column.

An expression may use the file's own columns, `row` (from 0) and `file_hash` (12 hex digits over the content: a format
without request ids is given ids that stay the same when the file is moved or listed twice). What cannot be cast is
NULL and lands in quarantine. Another format is another entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

NATIVE = "tideforge-parquet"


@dataclasses.dataclass(frozen=True)
class Format:
    name: str
    kind: str  # parquet | csv | jsonl
    source: Mapping[str, str]  # column of the file that must be there -> DuckDB type it is read as
    columns: Mapping[str, str]  # declared column -> SQL expression


FORMATS = (
    Format(
        name="azure-llm-inference-csv",
        kind="csv",
        source={"TIMESTAMP": "VARCHAR", "ContextTokens": "VARCHAR", "GeneratedTokens": "VARCHAR"},
        columns={
            "request_id": "file_hash || '-' || row",
            "arrival": "TRY_CAST(\"TIMESTAMP\" AS TIMESTAMP) AT TIME ZONE 'UTC'",
            "prompt_tokens": "TRY_CAST(ContextTokens AS BIGINT)",
            "output_tokens": "TRY_CAST(GeneratedTokens AS BIGINT)",
        },
    ),
    Format(  # milliseconds from the start of the trace: counted from 2000-01-01, so its hours of the day mean nothing
        name="mooncake-jsonl",
        kind="jsonl",
        source={"timestamp": "BIGINT", "input_length": "BIGINT", "output_length": "BIGINT", "hash_ids": "UBIGINT[]"},
        columns={
            "request_id": "file_hash || '-' || row",
            "arrival": "TRY_CAST(make_timestamptz(946684800000000 + timestamp * 1000) AS TIMESTAMPTZ)",
            "prompt_tokens": "input_length",
            "output_tokens": "output_length",
            "prefix_hashes": "hash_ids",
        },
    ),
)
