from __future__ import annotations

import datetime
import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tideforge.data import files
from tideforge.data.log_writer import RequestRow, TrafficLog
from tideforge.data.readers import read_logs
from tideforge.errors import UserError
from tideforge.flows.cli import cli, main
from tideforge.tasks.endpoint import Endpoint, Hardware, Traffic
from tideforge.tasks.ingest import ingest
from tideforge.tasks.profile import profile, read_profile, read_workload, workload
from tideforge.tasks.store import Run

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def row(number: int, **fields: Any) -> RequestRow:
    return RequestRow(f"r{number}", NOW + datetime.timedelta(seconds=number), 10, 5, **fields)


def endpoint_of(state: Path, logs: list[str]) -> Endpoint:
    return Endpoint(
        name="x",
        model=state,
        launch="tideforge serve",
        hardware=Hardware(name="cpu"),
        traffic=Traffic(logs=logs),
        state=state,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "traffic"
    assert not [thread for thread in threading.enumerate() if thread.name == "traffic-log"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.ParquetFile(path).read().to_pylist()]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_rows_rotate_by_number_and_the_rest_comes_on_close(folder: Path) -> None:
    log = TrafficLog(folder, rows_per_file=10, seconds_per_file=3600)
    for number in range(25):
        log.record(row(number, prefix_hashes=(2**64 - 1,), latency_ms=1.5))
    until(lambda: log.written >= 10)
    log.close()
    log.close()
    assert log.written == 25 and log.dropped == 0 and len(rows_of(folder)) == 25
    assert read_logs(sorted(folder.iterdir())).report.kept == 25


def test_rows_rotate_by_time(folder: Path) -> None:
    log = TrafficLog(folder, seconds_per_file=0.05)
    log.record({"request_id": "a", "arrival": NOW, "prompt_tokens": 1, "output_tokens": 1})
    until(lambda: log.written == 1)
    log.close()
    assert [each["request_id"] for each in rows_of(folder)] == ["a"]


@pytest.mark.parametrize("keep_text", [True, False])
def test_text_is_written_only_where_it_is_kept(folder: Path, keep_text: bool) -> None:
    log = TrafficLog(folder, keep_text=keep_text)
    log.record(row(0, prompt_text="swordfish", output_text="swordfish"))
    log.close()
    assert ("prompt_text" in rows_of(folder)[0]) is keep_text
    assert (b"swordfish" in b"".join(path.read_bytes() for path in folder.iterdir())) is keep_text


def test_record_does_not_wait_for_a_stuck_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = files.os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda fd: (gate.wait(60), real(fd))[1])
    log = TrafficLog(folder, rows_per_file=1, seconds_per_file=0.01, most_waiting=5)
    for number in range(40):
        log.record(row(number))
    assert log.dropped > 0 and log.written == 0  # the disk still holds its first write
    gate.set()
    log.close()
    assert log.written + log.dropped == 40 == len(rows_of(folder)) + log.dropped


def test_a_full_disk_keeps_rows_until_there_is_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = True
    real = files.os.fsync

    def fsync(fd: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(files.os, "fsync", fsync)
    log = TrafficLog(folder, seconds_per_file=3600)
    log.record(row(0))
    with pytest.raises(UserError, match="disk is full"):
        log.flush()
    assert list(folder.iterdir()) == []
    full = False
    log.close()
    assert [each["request_id"] for each in rows_of(folder)] == ["r0"]


def test_a_row_of_a_wrong_type_does_not_stop_the_log(folder: Path) -> None:
    log = TrafficLog(folder, seconds_per_file=3600)
    log.record(row(0, prefix_hashes=(2**80,)))
    log.flush()
    log.record(row(1))
    log.close()
    assert (log.dropped, [each["request_id"] for each in rows_of(folder)]) == (1, ["r1"])
    with pytest.raises(ValueError, match="time zone"):
        RequestRow("a", datetime.datetime(2026, 1, 1), 1, 1)


def test_the_nodes_hand_over_files_and_resume(tmp_path: Path) -> None:
    state = tmp_path / "state"
    log = TrafficLog(state / "traffic")
    log.record(row(0))
    log.record(row(0))
    log.close()
    lines = [f"2026-01-01 00:00:{number % 60:02d},{20 + number},{5 + number}" for number in range(200)]
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    endpoint = endpoint_of(state, [str(tmp_path / "*.csv")])
    run = Run.create(state / "runs", "r1")
    first = ingest(run, endpoint)
    assert (first.extra["kept"], first.extra["duplicates"], len(first.inputs)) == (201, 1, 2)
    made = profile(run, endpoint)
    assert read_profile(run).sha256 == made.extra["profile"] == made.outputs["profile"].sha256
    chosen = workload(run, endpoint, range(1000))
    assert read_workload(run).profile == made.extra["profile"] and len(read_workload(run).notes) >= 5
    assert not [path for path in run.folder.iterdir() if path.name.startswith(".")]

    TrafficLog(state / "traffic").close()
    later = TrafficLog(state / "traffic")
    later.record(row(9))
    later.close()
    assert (ingest(run, endpoint), profile(run, endpoint), workload(run, endpoint, range(1000))) == (
        first,
        made,
        chosen,
    )
    assert workload(run, endpoint, range(1001)) != chosen
    assert ingest(Run.create(state / "runs", "r2"), endpoint).extra["kept"] == 202
    run.path(first, "requests").unlink()
    assert ingest(run, endpoint).extra["kept"] == 202


def test_an_endpoint_without_logs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"traffic\.logs"):
        ingest(Run.create(tmp_path, "r"), endpoint_of(tmp_path, []))
    with pytest.raises(UserError, match="has not run"):
        profile(Run.open(tmp_path, "r"), endpoint_of(tmp_path, []))


def test_ingest_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01,5,6\n2026-01-01,0,6\n")
    result = CliRunner().invoke(cli, ["ingest", str(path), "--out", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["quarantined"] == {"prompt_tokens is not positive": 1}
    assert sorted(each.name.split("-")[0] for each in (tmp_path / "out").iterdir()) == [
        "ingest",
        "quarantine",
        "requests",
    ]
    assert "quarantined 1: prompt_tokens is not positive" in CliRunner().invoke(cli, ["ingest", str(path)]).output


def test_profile_on_the_command_line() -> None:
    shown = CliRunner().invoke(cli, ["profile", "sample:azure_conv_2023"])
    assert (
        shown.exit_code == 0 and "1020" in shown.output and "█" in shown.output and "without a latency" in shown.output
    )
    result = CliRunner().invoke(cli, ["profile", "sample:azure_conv_2023", "--json"])
    assert json.loads(result.output)["requests"] == 19366


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    for arguments in (["profile", str(tmp_path / "cut.parquet")], ["ingest", str(tmp_path / "none")], ["profile"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.count("\n") == 1 and error.startswith("tideforge: ")
