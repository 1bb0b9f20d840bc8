"""Whatever bytes, lines or columns a file has: it is read with every row accounted for, or a UserError names it.

TIDEFORGE_FUZZ is the number of examples a test, 8 where it is not set; `TIDEFORGE_FUZZ=500 pytest FILE` looks deeper.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.format_samples import SAMPLES, Sample
from tideforge.data.mapping import Format, chosen_formats, load_format
from tideforge.data.readers import read_logs
from tideforge.errors import UserError

few = hypothesis.settings(
    max_examples=int(os.environ.get("TIDEFORGE_FUZZ", "8")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
TEXTS = [sample for sample in SAMPLES if not sample.file.endswith(".parquet")]


def check(path: Path, formats: tuple[Format, ...] = ()) -> None:
    """Reads the file. Any error but a UserError of one line that names the file fails the test."""
    try:
        reading = read_logs([path], formats)
    except UserError as error:
        assert path.name in error.thing and "\n" not in str(error)
        return
    report = reading.report
    assert report.rows == report.kept + report.duplicates + sum(report.quarantined.values()) > 0
    reading.write_requests(path.with_name("requests.out"))
    reading.write_quarantine(path.with_name("quarantine.out"))
    assert pq.read_metadata(path.with_name("requests.out")).num_rows == report.kept
    assert pq.read_metadata(path.with_name("quarantine.out")).num_rows == sum(report.quarantined.values())


@few
@hypothesis.given(raw=st.binary(max_size=300), name=st.sampled_from(["a.csv", "a.jsonl", "a.parquet", "a.csv.gz"]),
                  start=st.sampled_from([b"", b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"{", b"[", b"\xef\xbb\xbf"]))  # fmt: skip
def test_any_bytes(tmp_path: Path, raw: bytes, name: str, start: bytes) -> None:
    (tmp_path / name).write_bytes(start + raw)
    check(tmp_path / name)


@few
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.name}-{sample.file}")
def test_a_sample_with_some_bytes_changed(tmp_path: Path, sample: Sample, data: st.DataObject) -> None:
    path = sample.make(tmp_path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"\n", b'"', b",", b"{", b"]", b"null", b"-1", b"1e999", b"\0"])
        )
    path.write_bytes(bytes(raw))
    check(path)


odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
jsons = st.recursive(odd, lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below, max_size=3),
                     max_leaves=6)  # fmt: skip


def spoilt(value: Any, data: st.DataObject) -> Any:
    """The same shape with some of its values replaced or left out."""
    if data.draw(st.integers(0, 9)) == 0:
        return data.draw(jsons)
    if isinstance(value, dict):
        return {key: spoilt(each, data) for key, each in value.items() if data.draw(st.integers(0, 9))}
    return [spoilt(each, data) for each in value] if isinstance(value, list) else value


@few
@hypothesis.given(data=st.data())
@pytest.mark.parametrize(
    "sample", [each for each in TEXTS if each.file.endswith((".jsonl", ".log"))], ids=lambda sample: sample.name
)
def test_json_lines_of_another_shape(tmp_path: Path, sample: Sample, data: st.DataObject) -> None:
    path = sample.make(tmp_path)
    lines = path.read_text().splitlines()
    made = [lines[0], *(json.dumps(spoilt(json.loads(line), data)) for line in lines * 2)]
    path.write_text("\n".join(made))
    check(path)


@few
@hypothesis.given(fields=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=9))
def test_any_fields_of_csv(tmp_path: Path, fields: list[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens\n1,m,2,3\n" + ",".join(fields) + "\n", encoding="utf-8"
    )
    check(path)


@few
@hypothesis.example(names=['{"a\\nb": 1}'], line="")
@hypothesis.given(names=st.lists(st.sampled_from(["TIMESTAMP", "ContextTokens", "GeneratedTokens", "", '"', "a b"])
                                 | st.text(max_size=4), max_size=6), line=st.text(max_size=30))  # fmt: skip
def test_any_header_of_csv(tmp_path: Path, names: list[str], line: str) -> None:
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + line + "\n", encoding="utf-8", errors="replace")
    check(tmp_path / "a.csv")


types = st.sampled_from(
    [pa.int8(), pa.uint64(), pa.float32(), pa.string(), pa.binary(), pa.bool_(), pa.date32(), pa.timestamp("ns"),
     pa.timestamp("s", tz="Asia/Tokyo"), pa.duration("ms"), pa.decimal128(20, 3), pa.list_(pa.int64()), pa.null(),
     pa.struct([("gen_ai.usage.output_tokens", pa.string())]), pa.map_(pa.string(), pa.int32())]
)  # fmt: skip
NAMES = ("request_id", "arrival", "prompt_tokens", "output_tokens", "prefix_hashes", "row", "broken", "file_row_number",
         "Timestamp", "SpanId", "Duration", "SpanAttributes", "span_id", "start_time_unix_nano", "attributes", '"', "")  # fmt: skip


def some_value(kind: pa.DataType) -> Any:
    values = {pa.string(): "12", pa.binary(): b"\xff", pa.bool_(): True, pa.date32(): datetime.date(2026, 1, 1)}
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_null(kind):
        return None
    if pa.types.is_nested(kind):
        return [] if not pa.types.is_struct(kind) else {"gen_ai.usage.output_tokens": "5"}
    return values.get(kind, 7)


@few
@hypothesis.given(columns=st.dictionaries(st.sampled_from(NAMES), types, max_size=8))
def test_any_columns_of_parquet(tmp_path: Path, columns: dict[str, pa.DataType]) -> None:
    arrays = {name: pa.array([some_value(kind), None], kind) for name, kind in columns.items()}
    pq.write_table(pa.table(arrays), tmp_path / "a.parquet")
    check(tmp_path / "a.parquet")


@few
@hypothesis.given(data=st.data(), text=st.text(max_size=20))
def test_any_mapping_is_read_or_refused(tmp_path: Path, data: st.DataObject, text: str) -> None:
    column = st.fixed_dictionaries(
        {"from": st.sampled_from(["a", "b/c", "é/~1", "'\"", ""]) | st.lists(st.text(max_size=3), max_size=2)},
        optional={
            "unit": st.sampled_from(["s", "ns", "text", "items", "weeks"]),
            "pattern": st.sampled_from(["(.)", "(?P<x>a)", "((", "(\\d+)'", "(?=a)(b)"]),
            "scale": st.floats(),
        },
    )
    raw = {
        "name": "mine", "kind": data.draw(st.sampled_from(["csv", "jsonl", "otlp-json"])), "needs": ["a"],
        "columns": {
            "arrival": {"from": "a", "unit": "s"}, "prompt_tokens": {"from": "b"}, "output_tokens": {"from": "b"},
            **data.draw(st.dictionaries(st.sampled_from(["request_id", "latency_ms", "end", "tenant", "arrival"]), column)),
        },
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(raw))
    try:
        mapping = load_format(tmp_path / "mine.yaml")
    except UserError as error:
        assert "mine.yaml" in error.thing and "\n" not in str(error)
        return
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": 1, "b": 2}) + "\n" + json.dumps({"a": text, "b": text}) + "\n")
    check(tmp_path / "a.jsonl", (mapping,))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n" + text.replace("\r", "") + "\n", encoding="utf-8", errors="replace")
    check(tmp_path / "a.csv", (mapping,))


@few
@hypothesis.given(raw=st.binary(max_size=40))
def test_any_mapping_file(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "mine.yaml").write_bytes(raw)
    with pytest.raises(UserError) as caught:
        chosen_formats([str(tmp_path / "mine.yaml")])
    assert "mine.yaml" in caught.value.thing and "\n" not in str(caught.value)


@few
@hypothesis.given(cut=st.integers(0, 200), flip=st.integers(0, 200))
def test_any_damage_of_a_packed_file(tmp_path: Path, cut: int, flip: int) -> None:
    raw = bytearray(gzip.compress(TEXTS[0].make(tmp_path).read_bytes() * 3))
    raw[flip % len(raw)] ^= 0x55
    (tmp_path / "a.csv.gz").write_bytes(bytes(raw[: max(1, len(raw) - cut)]))
    check(tmp_path / "a.csv.gz")
