"""Every declared format: a sample shaped as its source writes it, a damaged one, an empty one; mappings without code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.data.format_samples import AZURE, SAMPLES, VLLM, Sample, lines, ms
from tideforge.data import readers
from tideforge.data.ingest_report import IngestReport
from tideforge.data.mapping import chosen_formats, known_formats, load_format
from tideforge.data.readers import read_logs
from tideforge.errors import UserError
from tideforge.flows.cli import cli
from tideforge.tasks.endpoint import Endpoint, Hardware, Traffic
from tideforge.tasks.ingest import ingest
from tideforge.tasks.store import Run

ROWS = "SELECT epoch_ms(arrival), prompt_tokens, output_tokens FROM requests ORDER BY arrival"
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.name}-{sample.file}")


def balanced(report: IngestReport) -> bool:
    return report.rows == report.kept + report.duplicates + sum(report.quarantined.values())


def test_every_known_format_has_a_sample() -> None:
    assert {each.name for each in known_formats()} == {sample.name for sample in SAMPLES}


@each_sample
def test_a_sample_is_recognised_and_read(tmp_path: Path, sample: Sample) -> None:
    reading = read_logs([sample.make(tmp_path)])
    assert reading.report.files[0].format == sample.name
    assert reading.db.sql(ROWS).fetchall() == sample.rows
    assert (reading.report.kept, reading.report.quarantined) == (len(sample.rows), {})
    assert reading.report.files[0].passed_over == sample.passed
    columns = ", ".join(sample.first) or "1"
    first = reading.db.sql(f"SELECT {columns} FROM requests ORDER BY arrival LIMIT 1").fetchall()
    assert first == [tuple(sample.first.values()) or (1,)]


@each_sample
def test_text_never_leaves_the_log(tmp_path: Path, sample: Sample) -> None:
    reading = read_logs([sample.make(tmp_path)])
    reading.write_requests(tmp_path / "out.parquet")
    assert "secret" not in str(pq.read_table(tmp_path / "out.parquet").to_pylist())


@each_sample
def test_what_a_file_cannot_give_is_named(tmp_path: Path, sample: Sample) -> None:
    reading = read_logs([sample.make(tmp_path)])
    missing = reading.report.files[0].missing
    for name in missing:
        assert reading.db.sql(f"SELECT count({name}) FROM requests").fetchall() == [(0,)]
    assert not set(missing) & {name for name, value in sample.first.items() if value is not None}


@each_sample
def test_a_damaged_sample_is_refused_by_name_or_its_good_rows_are_kept(tmp_path: Path, sample: Sample) -> None:
    path = sample.make(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) * 3 // 4], whole + b'{"torn', whole[:40] + b"\xff\xfe\x00" * 9 + whole[67:]):
        path.write_bytes(damaged)
        try:
            report = read_logs([path]).report
        except UserError as error:
            assert sample.file in error.thing and "\n" not in str(error)
        else:
            assert balanced(report)


@each_sample
def test_an_empty_sample_is_refused_by_name(tmp_path: Path, sample: Sample) -> None:
    path = sample.make(tmp_path)
    empty = sample.empty
    if path.suffix == ".parquet":
        pq.write_table(pq.read_table(path).slice(0, 0), path)
        empty = path.read_bytes()
    for content, problem in ((b"", "is empty"), (b" \n\n", "is empty"), (empty, "has no rows|is empty")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=problem) as caught:
            read_logs([path])
        assert sample.file in caught.value.thing


def test_a_torn_line_spoils_one_row(tmp_path: Path) -> None:
    for sample in SAMPLES:
        if sample.file.endswith((".jsonl", ".log")):
            path = sample.make(tmp_path)
            path.write_bytes(path.read_bytes() + b'{"timestamp": 1, "ti\xff\n')
            report = read_logs([path]).report
            assert (report.kept, report.quarantined) == (len(sample.rows), {"the line is broken": 1}), sample.name


def test_a_bad_byte_spoils_one_line_of_csv(tmp_path: Path) -> None:
    good = b"2023-11-16 18:15:46.6805900,374,44\n"
    (tmp_path / "a.csv").write_bytes(AZURE.encode() + good + b"2023-11-16 18:15:47,3\xff4,44\n" + good)
    report = read_logs([tmp_path / "a.csv"]).report
    assert report.kept == 2 and report.quarantined == {"prompt_tokens is missing or unreadable": 1}


MINE = """
name: my-gateway
kind: jsonl
needs: [when, usage]
only: { from: kind, pattern: '^done$' }
time_zone: Europe/Berlin
columns:
  request_id: { from: id }
  end: { from: when, unit: text }
  latency_ms: { from: took, unit: us }
  prompt_tokens: { from: [usage/in, usage/prompt], scale: 1000 }
  output_tokens: { from: usage/ids, unit: items }
  tenant: { from: who, pattern: '^team-(.*)$' }
  region: { from: 'a~1b.c' }
"""
LINE = {"when": "2026-07-01 12:00:00", "kind": "done", "id": "x", "took": 1_500_000, "who": "team-blue", "a/b.c": "eu",
        "usage": {"prompt": 1.5, "ids": "[7, 8, 9]"}}  # fmt: skip


def test_a_new_format_is_a_mapping_and_no_code(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    lines({**LINE, "kind": "begun"}, LINE, {**LINE, "id": "y", "when": "2026-07-01T12:00:00+09:00"})(tmp_path / "a.log")
    with pytest.raises(UserError, match="no known format"):
        read_logs([tmp_path / "a.log"])
    reading = read_logs([tmp_path / "a.log"], chosen_formats([str(tmp_path / "mine.yaml")]))
    found = reading.db.sql(
        "SELECT request_id, strftime(arrival, '%H:%M:%S.%g'), latency_ms, prompt_tokens, output_tokens, tenant, region "
        "FROM requests ORDER BY request_id"
    ).fetchall()
    rest = (1500.0, 1500, 3, "blue", "eu")
    assert found == [("x", "09:59:58.500", *rest), ("y", "02:59:58.500", *rest)]
    file = reading.report.files[0]
    assert (file.format, file.passed_over) == ("my-gateway", 1) and "Europe/Berlin" in file.times
    assert set(file.missing) == {"cached_tokens", "ttft_ms", "model", "prefix_hashes", "finish_reason"}


def test_a_given_format_goes_before_looking_and_is_not_passed_by(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE + "2023-11-16 18:15:46,374,44\n")
    (tmp_path / "swapped.yaml").write_text(
        "name: swapped\nkind: csv\nneeds: [TIMESTAMP]\ncolumns:\n  arrival: {from: TIMESTAMP, unit: text}\n"
        "  prompt_tokens: {from: GeneratedTokens}\n  output_tokens: {from: ContextTokens}\n"
    )
    reading = read_logs([path], chosen_formats([str(tmp_path / "swapped.yaml")]))
    assert reading.db.sql("SELECT prompt_tokens, output_tokens FROM requests").fetchall() == [(44, 374)]
    with pytest.raises(UserError, match=r"a\.csv: its columns .* are those of no given format; given are burstgpt-csv"):
        read_logs([path], chosen_formats(["burstgpt-csv"]))
    assert read_logs([path], chosen_formats(["mooncake-jsonl"])).report.kept == 1  # of another kind: looked at


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("kind: jsonl", "kind: xml"), "kind"),
        (("needs: [when, usage]", "needs: []"), "needs"),
        (("Europe/Berlin", "Mars/Base"), "no known time zone"),
        (("unit: us", "unit: text"), "columns.latency_ms is a duration"),
        (("unit: text", "unit: items"), "columns.end is a time"),
        (("  request_id: { from: id }", "  prompt_text: { from: id }"), "prompt_text is no declared column"),
        (("'^team-(.*)$'", "'^team-'"), "one group"),
        (("'^team-(.*)$'", "'(team'"), "is no pattern"),
        (("  tenant:", "  output_tokens2:"), "no declared column"),
        (("  latency_ms:", "  ttft_ms:"), "columns.arrival is missing"),
        (("name: my-gateway", "name: my-gateway\nfast: yes"), "fast: Extra inputs"),
        (("name: my-gateway", "name: [1"), "cannot be read"),
        (("scale: 1000", "scale: -1"), "scale"),
    ],
)
def test_a_bad_mapping_names_file_and_field(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    path = tmp_path / "mine.yaml"
    assert change[0] in MINE
    path.write_text(MINE.replace(*change))
    with pytest.raises(UserError, match=problem) as caught:
        load_format(path)
    assert str(path) in caught.value.thing and "\n" not in str(caught.value)


def test_a_name_that_is_no_format_lists_those_there_are() -> None:
    with pytest.raises(UserError, match="azure-llm-inference-csv, burstgpt-csv"):
        chosen_formats(["azur"])


def test_a_pattern_that_only_python_knows_is_an_error_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE.replace("'^team-(.*)$'", "'^team-(?=b)(.*)$'"))
    lines(LINE)(tmp_path / "a.log")
    with pytest.raises(UserError, match=r"a\.log: cannot be read as my-gateway"):
        read_logs([tmp_path / "a.log"], chosen_formats([str(tmp_path / "mine.yaml")]))


def test_lines_of_a_request_count_once_and_in_any_order(tmp_path: Path) -> None:
    for order in (VLLM, VLLM[::-1]):
        lines(*order)(tmp_path / "a.log")
        reading = read_logs([tmp_path / "a.log"])
        found = reading.db.sql("SELECT request_id, prompt_tokens, output_tokens FROM requests ORDER BY arrival")
        assert found.fetchall() == [("chatcmpl-a26", 4, 3), ("cmpl-77", 2, 6)]
    lines(*VLLM[:4])(tmp_path / "a.log")
    assert read_logs([tmp_path / "a.log"]).report.quarantined == {"output_tokens is missing or unreadable": 2}


def test_an_array_of_objects_is_read_like_lines(tmp_path: Path) -> None:
    row = {"timestamp": 5, "input_length": 6, "output_length": 7, "hash_ids": [1]}
    (tmp_path / "a.json").write_text(json.dumps([row, {**row, "timestamp": 9}], indent=1))
    assert read_logs([tmp_path / "a.json"]).report.kept == 2


def test_a_clock_that_runs_backwards_is_noticed(tmp_path: Path) -> None:
    row = {"timestamp": 5000, "input_length": 6, "output_length": 7, "hash_ids": []}
    lines(*({**row, "timestamp": at} for at in (0, 9000, 2000, 3000, 1500)))(tmp_path / "a.jsonl")
    lines(*({**row, "timestamp": at} for at in (1, 2, 2, 3)))(tmp_path / "b.jsonl")
    report = read_logs([tmp_path / "b.jsonl", tmp_path / "a.jsonl"]).report
    steps = {file.name: (file.steps_back, file.largest_step_back_s) for file in report.files}
    assert steps == {"a.jsonl": (2, 7.0), "b.jsonl": (0, 0.0)}
    assert "  its clock runs backwards 2 times, by 7 s at most" in list(report.lines())


def test_requests_in_order_of_their_end_are_no_clock_fault(tmp_path: Path) -> None:
    line = "{},1,{},m,10,20,30,API log\n"
    ended = [(10, 1), (2, 10), (11, 2), (5, 9)]  # arrival and duration: ends at 11, 12, 13, 14
    (tmp_path / "a.csv").write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        + "".join(line.format(*each) for each in ended)
    )
    assert read_logs([tmp_path / "a.csv"]).report.files[0].steps_back == 0


def test_a_report_of_the_first_version_can_still_be_read() -> None:
    old = {
        "version": 1, "files": [{"name": "a", "sha256": "0", "format": "f", "rows": 1}], "rows": 1, "kept": 1,
        "duplicates": 0, "quarantined": {}, "first_arrival": None, "last_arrival": None,
    }  # fmt: skip
    assert IngestReport.model_validate(old).files[0].steps_back == 0
    with pytest.raises(ValueError, match="version"):
        IngestReport.model_validate({**old, "version": 3})


def test_the_mapping_in_the_readme_reads_a_log(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (shown,) = re.findall(r"```yaml\n(name: my-gateway\n.*?)```", readme, flags=re.DOTALL)
    (tmp_path / "mine.yaml").write_text(shown)
    line = {"when": "2026-07-01 12:00:00", "status": "done", "id": "x", "took": 1.5, "usage": {"prompt": 5, "out": 6}}
    lines(line, {**line, "status": "begun"})(tmp_path / "a.jsonl")
    reading = read_logs([tmp_path / "a.jsonl"], chosen_formats([str(tmp_path / "mine.yaml")]))
    found = reading.db.sql("SELECT strftime(arrival, '%H'), latency_ms, prompt_tokens FROM requests").fetchall()
    assert found == [("10", 1500.0, 5)]


def test_the_readme_names_every_format() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert [each.name for each in known_formats() if f"`{each.name}`" not in readme] == []


def endpoint_of(folder: Path, formats: list[str]) -> Endpoint:
    return Endpoint(
        name="x", model=folder, launch="tideforge serve", hardware=Hardware(name="cpu"), state=folder,
        traffic=Traffic(logs=[str(folder / "a.log")], formats=formats),
    )  # fmt: skip


def test_an_endpoint_names_formats_and_another_mapping_makes_ingest_run_again(tmp_path: Path) -> None:
    mapping = tmp_path / "mine.yaml"
    mapping.write_text(MINE)
    lines(LINE)(tmp_path / "a.log")
    run = Run.create(tmp_path, "run")
    with pytest.raises(UserError, match="no known format"):
        ingest(run, endpoint_of(tmp_path, []))
    first = ingest(run, endpoint_of(tmp_path, [str(mapping)]))
    assert ingest(run, endpoint_of(tmp_path, [str(mapping)])) == first
    mapping.write_text(MINE.replace("scale: 1000", "scale: 2000"))
    second = ingest(run, endpoint_of(tmp_path, [str(mapping)]))
    tokens = [pq.read_table(run.path(each, "requests"))["prompt_tokens"].to_pylist() for each in (first, second)]
    assert tokens == [[1500], [3000]]


def test_the_command_takes_a_format_and_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    lines({**LINE, "kind": "begun"}, LINE)(tmp_path / "a.log")
    given = ["ingest", str(tmp_path / "a.log"), "--format", str(tmp_path / "mine.yaml")]
    said = CliRunner().invoke(cli, given).output.splitlines()
    assert said[0] == "a.log: 1 rows (my-gateway, 1 passed over)" and "kept 1 of 1, 0 duplicates dropped" in said
    assert "times are written; Europe/Berlin is assumed where no zone is" in said
    assert json.loads(CliRunner().invoke(cli, [*given, "--json"]).output)["files"][0]["passed_over"] == 1


def test_memory_and_disk_that_are_used_up_are_no_fault_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = SAMPLES[0].make(tmp_path)
    for error, problem in (
        (duckdb.OutOfMemoryException("Out of Memory Error: x"), "needs more memory"),
        (duckdb.IOException("IO Error: No space left on device"), "the disk is full"),
    ):
        monkeypatch.setattr(readers, "insert", raising(error))
        with pytest.raises(UserError, match=problem):
            read_logs([path])


def raising(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_column_of_csv_may_have_a_slash(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("t,tokens/in,tokens/out\n5,6,7\n")
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nkind: csv\nneeds: [tokens/in]\nepoch: 2026-01-01\ncolumns:\n  arrival: {from: t, unit: s}\n"
        "  prompt_tokens: {from: tokens/in}\n  output_tokens: {from: tokens/out}\n"
    )
    reading = read_logs([tmp_path / "a.csv"], chosen_formats([str(tmp_path / "mine.yaml")]))
    assert reading.db.sql(ROWS).fetchall() == [(ms("2026-01-01") + 5000, 6, 7)]
