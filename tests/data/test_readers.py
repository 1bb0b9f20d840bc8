from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tideforge.data import readers
from tideforge.data.logs import find_logs
from tideforge.data.readers import IngestReport, read_logs
from tideforge.data.schema import LOG_SCHEMA, QUARANTINE_SCHEMA, REQUESTS_SCHEMA
from tideforge.errors import UserError

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD_LINE = "2023-11-16 18:15:46.6805900,374,44\n"


def row(number: int, **changes: Any) -> dict[str, Any]:
    good = {
        "request_id": f"r{number}", "arrival": START + datetime.timedelta(seconds=number),
        "prompt_tokens": 10 + number, "output_tokens": 5,
    }  # fmt: skip
    return {**good, **changes}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    # Fields are nullable here: a foreign writer's nulls must reach the reader.
    names = [name for name in LOG_SCHEMA.names if any(name in each for each in rows)]
    schema = pa.schema([pa.field(name, LOG_SCHEMA.field(name).type) for name in names])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def account(report: IngestReport) -> int:
    return report.kept + report.duplicates + sum(report.quarantined.values())


def test_the_packaged_trace_is_whole_and_equals_its_csv_form(tmp_path: Path) -> None:
    reading = read_logs(find_logs(["sample:azure_conv_2023"]))
    assert reading.report.rows == reading.report.kept == 19366 and not reading.report.quarantined
    columns = "SELECT arrival, prompt_tokens, output_tokens FROM requests ORDER BY arrival LIMIT 1"
    first = reading.db.sql(columns).fetchall()
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + GOOD_LINE)
    again = read_logs([path])
    assert again.report.files[0].format == "azure-llm-inference-csv"
    assert again.db.sql(columns).fetchall() == first


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is not positive"),
        ({"output_tokens": -3}, "output_tokens is not positive"),
        ({"prompt_tokens": None}, "prompt_tokens is missing or unreadable"),
        ({"arrival": None}, "arrival is missing or unreadable"),
        ({"request_id": None}, "request_id is missing or unreadable"),
        ({"request_id": ""}, "request_id is empty"),
        ({"arrival": datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC)}, "arrival is out of range"),
        ({"arrival": datetime.datetime(2500, 1, 1, tzinfo=datetime.UTC)}, "arrival is out of range"),
        ({"prompt_tokens": 10**12}, "tokens are out of range"),
        ({"cached_tokens": 12}, "cached_tokens is out of range"),
        ({"latency_ms": -1.0}, "latency_ms is out of range"),
        ({"latency_ms": math.nan}, "latency_ms is out of range"),
        ({"ttft_ms": math.inf}, "ttft_ms is out of range"),
    ],
)
def test_a_bad_row_is_kept_aside_with_its_reason(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    reading = read_logs([write(tmp_path / "a.parquet", [row(0), row(1, **changes), row(2)])])
    assert reading.report.quarantined == {reason: 1} and reading.report.kept == 2
    reading.write_quarantine(tmp_path / "q.parquet")
    table = pq.read_table(tmp_path / "q.parquet")
    assert table.schema.equals(QUARANTINE_SCHEMA)
    assert (table["reason"][0].as_py(), table["file"][0].as_py(), table["row"][0].as_py()) == (reason, "a.parquet", 1)


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    one = write(tmp_path / "a.parquet", [row(0), row(1), row(1, prompt_tokens=99)])
    two = write(tmp_path / "b.parquet", [row(1), row(2)])
    reading = read_logs([one, two])
    assert (reading.report.kept, reading.report.duplicates) == (3, 2)
    assert reading.db.sql("SELECT prompt_tokens FROM requests WHERE request_id = 'r1'").fetchall() == [(11,)]


def test_kept_requests_have_the_declared_schema_and_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [row(0, prompt_text="a secret", prefix_hashes=[2**63 + 1], region="eu")])
    reading = read_logs([path])
    reading.write_requests(tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.equals(REQUESTS_SCHEMA)
    assert table["prefix_hashes"][0].as_py() == [2**63 + 1]
    assert "secret" not in str(table.to_pylist())


def test_other_spellings_of_a_type_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "request_id": pa.array(["a"]).dictionary_encode(),
            "arrival": pa.array([START.replace(tzinfo=None)], pa.timestamp("ns")),
            "prompt_tokens": pa.array([7], pa.uint16()),
            "output_tokens": pa.array([3], pa.int32()),
            "latency_ms": pa.array([120], pa.int32()),
            "region": pa.nulls(1),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    reading = read_logs([tmp_path / "a.parquet"])
    found = reading.db.sql("SELECT epoch_us(arrival), prompt_tokens, latency_ms, region FROM requests").fetchall()
    assert found == [(int(START.timestamp()) * 1_000_000, 7, 120.0, None)]


@pytest.mark.parametrize("column", ["prompt_tokens", "arrival", "latency_ms", "prefix_hashes", "region"])
def test_a_wrong_type_names_file_and_column(tmp_path: Path, column: str) -> None:
    wrong = {"prompt_tokens": ["x"], "arrival": [1.5], "latency_ms": ["x"], "prefix_hashes": ["x"], "region": [1]}
    table = pa.Table.from_pylist([row(0)])
    table = table.drop_columns([column]) if column in table.schema.names else table
    pq.write_table(table.append_column(column, pa.array(wrong[column])), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"a.parquet: {column}: has type .*; write it as"):
        read_logs([tmp_path / "a.parquet"])


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([row(0)]).drop_columns(["output_tokens"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: output_tokens: the column is missing; add it as int64"):
        read_logs([tmp_path / "a.parquet"])


def test_files_that_are_no_log_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", [row(number) for number in range(50)]).read_bytes()
    cases: dict[str, tuple[bytes, str]] = {
        "zero.parquet": (b"", "is empty"),
        "cut.parquet": (whole[:-200], "truncated or damaged"),
        "hole.parquet": (whole[:60] + b"\xff" * 400 + whole[460:], "cannot be read"),
        "text.parquet": (b"hello", "is not Parquet"),
        "other.csv": (b"a,b\n1,2\n", r"columns \(a, b\) are those of no known format"),
        "other.jsonl": (b'{"a": 1}\n', "no known format"),
        "broken.jsonl": (b'{"a": \n', "not a JSON object"),
        "head.csv": (HEADER.encode(), "has no rows"),
    }
    for name, (raw, problem) in cases.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=problem) as caught:
            read_logs([tmp_path / name])
        assert name in caught.value.thing and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        read_logs([tmp_path / "nowhere.parquet"])


def test_a_log_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(LOG_SCHEMA.empty_table(), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: has no rows"):
        read_logs([tmp_path / "a.parquet"])


def test_a_broken_csv_line_breaks_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    lines = [
        "x,1,2",
        "2026-01-01,3",
        "2026-01-01,3,4,5",
        '2026-01-01,"3,4',
        '"2026-01-01","6","7"',
        "",
        "2026-01-02,8,9",
    ]
    path.write_bytes(b"\xef\xbb\xbf" + (HEADER + "\n".join(lines)).replace("\n", "\r\n").encode())
    reading = read_logs([path])
    assert reading.report.rows == 6 == account(reading.report)
    assert reading.report.quarantined == {"the line is broken": 3, "arrival is missing or unreadable": 1}
    assert reading.db.sql("SELECT row FROM quarantine ORDER BY row").fetchall() == [(0,), (1,), (2,), (3,)]
    assert reading.db.sql("SELECT prompt_tokens FROM requests ORDER BY arrival").fetchall() == [(6,), (8,)]


def test_mooncake_lines_are_read_with_their_prefixes(tmp_path: Path) -> None:
    good = '{"timestamp": 2500, "input_length": 6, "output_length": 5, "hash_ids": [0, 7]}\n'
    (tmp_path / "a.jsonl").write_text(good + '{"timestamp": "x", "input_length": 1, "output_length": 1}\n{"timest')
    reading = read_logs([tmp_path / "a.jsonl"])
    assert (reading.report.rows, reading.report.kept) == (3, 1)
    found = reading.db.sql("SELECT epoch_ms(arrival), prompt_tokens, prefix_hashes FROM requests").fetchall()
    assert found == [(946684800000 + 2500, 6, [0, 7])]


def test_logs_are_found_by_file_folder_glob_and_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [row(0)])
    (tmp_path / ".hidden.parquet").write_bytes(b"")
    for pattern in (str(path), str(tmp_path), str(tmp_path / "*.parquet")):
        assert find_logs([pattern, str(path)]) == [path.resolve()]
    for pattern in ("sample:none", str(tmp_path / "*.csv"), str(tmp_path / "nowhere")):
        with pytest.raises(UserError) as caught:
            find_logs([pattern])
        assert caught.value.thing == pattern


def test_a_full_disk_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = read_logs([write(tmp_path / "a.parquet", [row(0)])])

    class Full(pq.ParquetWriter):
        def write_table(self, *_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(readers.pq, "ParquetWriter", Full)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match="disk is full") as caught:
        reading.write_requests(out / "requests.parquet")
    assert caught.value.thing == str(out) and list(out.iterdir()) == []


optional = st.none() | st.integers(-5, 40)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "request_id": st.none() | st.sampled_from(["", "a", "b", "c", "ü'\"\n"]),
            "arrival": st.none() | st.datetimes(datetime.datetime(1960, 1, 1), datetime.datetime(2200, 1, 1)).map(
                lambda naive: naive.replace(tzinfo=datetime.UTC)
            ),
            "prompt_tokens": optional, "output_tokens": optional, "cached_tokens": optional,
            "latency_ms": st.none() | st.floats(),
        }
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(rows=rows)
def test_every_row_is_accounted_for(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    reading = read_logs([write(tmp_path_factory.mktemp("rows") / "a.parquet", rows)])
    assert reading.report.rows == len(rows) == account(reading.report)
    kept = reading.db.sql("SELECT request_id, prompt_tokens, output_tokens, cached_tokens FROM requests").fetchall()
    assert len({each[0] for each in kept}) == len(kept) == reading.report.kept
    assert all(name and prompt > 0 and output > 0 for name, prompt, output, _ in kept)
    assert all(cached is None or 0 <= cached <= prompt for _, prompt, _, cached in kept)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(text=st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=60))
@hypothesis.example(text="\x010")
@hypothesis.example(text="\x01\x02,\x03")
@hypothesis.example(text="\x00,1,2")
def test_any_csv_line_is_counted_once(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_text(HEADER + GOOD_LINE + text + "\n" + "2026-01-02 00:00:00,5,6\n", encoding="utf-8")
    report = read_logs([path]).report
    assert report.rows == account(report) and report.kept >= 2 and report.rows in (2, 3)
