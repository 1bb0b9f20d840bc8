"""JSON of the state folder that is truncated or somebody else's: one line that names the file and the remedy, exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tideforge.data.files import read_json
from tideforge.data.workload import Workload
from tideforge.engine.archive import Archive, read_trials
from tideforge.engine.events import read_events
from tideforge.engine.forward import Forward
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.setting import Setting
from tideforge.errors import UserError
from tideforge.flows.cli import main
from tideforge.flows.follow import describe
from tideforge.tasks import evidence
from tideforge.tasks.approve import refusals
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.incumbent import incumbent_folder
from tideforge.tasks.search.session import sessions
from tideforge.tasks.stack import Stack
from tideforge.tasks.store import Run
from tideforge.tasks.track import sync
from tideforge.tasks.watching import decisions

DAMAGE = ["", '{"time": ', "[]", "{}", "7", "null", "\x00\x01", "[" * 100_000]
TRIAL = "engine/n1/trials/000000-a/result.json"
FOREIGN = '{"kind": 1, "time": "noon", "recompile": true, "id": "000000-b", "count": "many", "last": []}'


def endpoint_of(state: Path) -> Endpoint:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    return Endpoint.model_validate({**raw, "state": str(state)})


def night(state: Path) -> Run:
    return Run(state / "runs" / "n1")


READERS: dict[str, Callable[[Path], Any]] = {
    TRIAL: lambda state: read_trials(state / "engine" / "n1"),
    "runs/n1/trials/000000-a/result.json": lambda state: evidence.read_trials(night(state), None),
    "runs/n1/trials/000001-a/result.json": lambda state: describe(
        {"event": "trial_end", "trial": "000001-a"}, night(state).folder
    ),
    "runs/n1/service.json": lambda state: ServiceConfig.read(night(state).folder / "service.json"),
    "runs/n1/setting.json": lambda state: Setting.read(night(state).folder),
    "runs/n1/workload-1.json": lambda state: Workload.read(night(state).folder / "workload-1.json"),
    "runs/n1/incumbent.json": lambda state: incumbent_folder(night(state), endpoint_of(state)),
    "runs/n1/refused.json": lambda state: refusals(night(state)),
    "runs/n1/spool/track.json": lambda state: sync(endpoint_of(state)),
    "drift/20260101.json": decisions,
    "stack.json": Stack.read,
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in (*DAMAGE, FOREIGN):
        path.write_text(text)
        with pytest.raises(UserError) as raised:
            READERS[name](tmp_path)
        said = str(raised.value)
        assert said.startswith(f"{path}: is damaged (") and said.count("\n") == 0 and raised.value.remedy, text
        assert len(said) < len(str(path)) + 400


def test_a_folder_in_its_place_is_damage_too_and_an_absent_file_is_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is damaged"):
        read_json(tmp_path, dict, "remove it")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", dict, "remove it")


def test_lines_that_are_torn_or_foreign_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(
        b'{"event": "a"}\n{"even\n7\n[]\n{"no": "event"}\n\xff\xfe\n{"event": "b"}\n{"ev'
    )
    assert [event["event"] for event in read_events(tmp_path)] == ["a", "b"]
    (tmp_path / "search-sessions.jsonl").write_text(
        '{"time": 1.0, "deadline": 2.0, "what": "opened"}\n{"time": \n3\n{}\n'
    )
    assert [entry["deadline"] for entry in sessions(Run(tmp_path))] == [2.0]


def test_the_command_line_ends_with_that_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, state = tmp_path / "e.yaml", tmp_path / "s"
    file.write_text(yaml.safe_dump(json.loads(endpoint_of(state).model_dump_json(exclude_defaults=True))))
    folder = state / "engine" / "n1"
    trial = Archive(folder, state / "forwards").submit(Forward({"forward.py": "a = 1\n"}), "slow", "x")
    (folder / "service.json").write_text("{")
    path = folder / "trials" / trial.id / "submission.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(SystemExit) as stopped:
        main(["engine", "trials", "--endpoint", str(file), "--state", str(state)])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and err.count("\n") == 1, (out, err)
    assert err.startswith(f"tideforge: {path}: is damaged (JSONDecodeError: ") and "stop and start its engine" in err
