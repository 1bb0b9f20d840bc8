"""Rows in the log, and nothing else, decide what the watch says; every look is written down."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tideforge.data.drift_rows import write_rows
from tideforge.data.drift_worlds import CASES, WORLDS, make
from tideforge.data.logs import find_logs
from tideforge.data.readers import read_logs
from tideforge.data.watches import FAMILIES, HISTORY
from tideforge.errors import UserError
from tideforge.flows.cli import cli
from tideforge.flows.demo import append_shift
from tideforge.tasks.drift import look
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.ingest import ingest
from tideforge.tasks.night import open_night
from tideforge.tasks.profile import profile
from tideforge.tasks.watching import watch_hours


@pytest.fixture
def profiled(tmp_path: Path) -> Endpoint:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    logs = {"logs": ["sample:azure_conv_2023"]}
    endpoint = Endpoint.model_validate({**raw, "traffic": logs, "state": str(tmp_path / "s")})
    run = open_night(endpoint, "n1", "test", "")
    ingest(run, endpoint)
    profile(run, endpoint)
    return endpoint


def test_shifted_rows_are_noticed_once_and_their_rows_kept(profiled: Endpoint) -> None:
    calm = look(profiled)
    assert not calm["drifted"] and calm["reason"].startswith("not judged: 0 new requests")
    time.sleep(1.1)
    append_shift(profiled, requests=600)
    found = look(profiled)
    assert found["drifted"] and found["recompile"] and found["new_requests"] == 600 and found["against"] == "n1"
    assert "prompt" in found["reason"] and Path(found["traffic"]).is_file()
    again = look(profiled)
    assert again["drifted"] and not again["recompile"] and again["cooling_down"]
    records = [json.loads(path.read_text()) for path in sorted((profiled.state / "drift").glob("*.json"))]
    assert [one["recompile"] for one in records] == [False, True, False]


def test_without_a_profile_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    with pytest.raises(UserError, match="holds no profile to compare with"):
        look(Endpoint.model_validate({**raw, "state": str(tmp_path)}))


def test_weeks_of_history_let_the_hourly_watches_judge(tmp_path: Path) -> None:
    run = make(WORLDS[0], CASES[3], 200, 4)
    write_rows(run.traffic, 4, tmp_path / "rows.parquet")
    db = read_logs(find_logs([str(tmp_path / "rows.parquet")])).db
    tuned = (run.traffic.first_hour + HISTORY) * 3600.0
    calm = watch_hours(db, tuned, tuned + 20 * 3600, alarming=False)
    assert not calm.skipped and calm.reasons == () and set(calm.figures) == set(FAMILIES)
    moved = watch_hours(db, tuned, (run.traffic.first_hour + run.passed + 24) * 3600.0, alarming=False)
    assert any(reason.startswith("level: all: prompt differs by +0.") for reason in moved.reasons), moved.reasons
    few = watch_hours(db, tuned - 3 * 7 * 24 * 3600, tuned, alarming=False)
    assert few.skipped == "1 whole weeks of history, 2 are needed"
    assert watch_hours(db, tuned + 9e7, tuned + 9e7, alarming=False).skipped == "no whole hour of requests"


def test_another_stack_alone_starts_a_night(profiled: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not look(profiled)["drifted"]
    monkeypatch.setattr("tideforge.tasks.drift.stack", lambda: {"driver": "another"})
    found = look(profiled)
    assert found["recompile"] and "stack: driver: none to another" in found["reason"] and found["traffic"] == ""
    monkeypatch.undo()
    assert not look(profiled)["drifted"]


def test_a_night_that_does_not_pay_is_refused_with_its_figures(profiled: Endpoint) -> None:
    poor = profiled.model_copy(update={"drift": profiled.drift.model_copy(update={"expected_gain": 0.0001})})
    time.sleep(1.1)
    append_shift(poor, requests=600)
    found = look(poor)
    assert found["drifted"] and not found["recompile"] and found["refused"].startswith("not worth it: a gain of 0.0%")
    assert found["stakes"]["source"].startswith("assumed") and found["stakes"]["worth_hours"] < 0.1


def test_decisions_are_shown_in_words_and_as_json_lines(profiled: Endpoint, tmp_path: Path) -> None:
    look(profiled)
    file = tmp_path / "e.yaml"
    file.write_text(json.dumps(profiled.model_dump(mode="json", exclude_defaults=True)))
    words = CliRunner().invoke(cli, ["drift", "--endpoint", str(file)])
    assert words.exit_code == 0 and "no: no drift" in words.output and "not judged: 0 new requests" in words.output
    lines = CliRunner().invoke(cli, ["drift", "--endpoint", str(file), "--json"]).output.splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["refused"] == "no drift"
