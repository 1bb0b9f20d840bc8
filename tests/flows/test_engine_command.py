"""`tideforge engine`: a person tries candidates by hand, through the real command line, on a two-layer endpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import tideforge.engine
from tideforge.engine.client import EngineControl
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.events import read_events
from tideforge.engine.lab import keeper_status
from tideforge.engine.setting import Setting
from tideforge.tasks import by_hand
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.search.session import open_search
from tideforge.tasks.store import Run

LLAMA = Path(tideforge.engine.__file__).parent / "models" / "llama"
pytestmark = pytest.mark.timeout(300)


class Place:
    def __init__(self, folder: Path, state: str = "s", **changed: Any) -> None:
        model = tiny_llama(folder / "model")
        flags = "--dtype float32 --max-num-seqs 8 --max-num-batched-tokens 256 --max-model-len 256"
        raw = {
            "name": "tiny", "model": str(model), "launch": f"tideforge serve --model {model} {flags}",
            "hardware": {"name": "cpu"}, "traffic": {"logs": ["sample:azure_conv_2023"]}, "state": str(folder / state),
            "workload": {"users": 4, "prompt_tokens": [8, 16], "output_tokens": 8, "search_output_tokens": 4},
            "budget": {"trial_s": 10, "search_s": 20}, **changed,
        }  # fmt: skip
        self.folder, self.file, self.state = folder, folder / "tiny.yaml", folder / state
        self.file.write_text(yaml.safe_dump(raw))

    def change(self, **fields: Any) -> None:
        """Other fields of the endpoint file."""
        self.file.write_text(yaml.safe_dump({**yaml.safe_load(self.file.read_text()), **fields}))

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tideforge.flows.cli", *words, "--endpoint", str(self.file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    def told(self, *words: str, code: int = 0) -> dict:
        done = self.cli(*words, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def refused(self, *words: str) -> str:
        done = self.cli(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("tideforge: ")
        return done.stderr

    def candidate(self, name: str, text: str, knobs: bool = False) -> str:
        folder = self.folder / name
        shutil.copytree(LLAMA, folder, ignore=shutil.ignore_patterns("__pycache__"))
        if not knobs:
            (folder / "knobs.json").unlink()
        (folder / "forward.py").write_text((folder / "forward.py").read_text() + text)
        return str(folder)


@pytest.fixture(scope="module")
def place():
    folder = Path(tempfile.mkdtemp(prefix="tf-"))
    place = Place(folder)
    yield place
    for _ in range(2):
        if by_hand.folder_in_use(Endpoint.load(place.file)) is not None:
            EngineControl(place.state, patience_s=0).stop()
    if (status := keeper_status(place.state)) is not None:
        os.kill(status["pid"], signal.SIGTERM)
    shutil.rmtree(folder, ignore_errors=True)


def test_nothing_runs_and_nothing_is_there(place):
    assert place.told("engine", "status") == {"runs": False}
    assert place.told("engine", "stop") == {"stopped": False}
    assert "no run there has a profile" in place.refused("engine", "start")
    assert "no such run" in place.refused("engine", "start", "--run", "n1")
    assert "no engine runs" in place.refused("engine", "submit", str(place.folder))
    assert "no engine was ever started" in place.refused("engine", "trials")
    assert "cannot be a file name" in place.refused("engine", "trials", "--run", "../x")
    assert not (place.state / "engine.sock").exists()


def test_candidates_are_tried_by_hand(place):
    for node in ("ingest", "profile"):
        assert place.cli("node", node, "--run", "n1").returncode == 0
    started = place.told("engine", "start")
    assert started["started"] and started["run"] == "n1"
    assert not place.told("engine", "start", "--run", "n1")["started"]
    queue = place.told("engine", "status")
    assert (queue["runs"], queue["night"], queue["waiting"], queue["ready"]) == (True, None, 0, True)

    passed = place.told("engine", "submit", place.candidate("good", "\n# the same\n"), "--wait")
    assert passed["outcome"] == "passed" and passed["figures"]["ratio"] > 0.2
    broken = place.candidate("broken", "\n\ndef build(ctx):\n    raise ValueError('on purpose')\n")
    failed = place.told("engine", "submit", broken, "--wait", code=1)
    assert failed["outcome"] == "build_error" and "on purpose" in failed["message"]
    again = place.told("engine", "submit", broken)
    assert again["id"] == failed["id"], "the same files are the same trial"

    assert "is not a folder" in place.refused("engine", "submit", str(place.folder / "nowhere"))
    assert "is not a forward" in place.refused("engine", "submit", str(place.folder / "s" / "logs"))
    listed = place.told("engine", "trials")
    assert [trial["outcome"] for trial in listed["trials"]] == ["passed", "build_error"]
    text = place.cli("engine", "trials").stdout
    assert "2 trials" in text and "times" in text and "on purpose" in text
    assert sum(event["event"] == "weight_load" for event in read_events(place.state)) == 1


def test_a_stop_keeps_the_archive_and_the_weights(place):
    assert place.told("engine", "stop") == {"stopped": True}
    assert place.told("engine", "status") == {"runs": False}
    assert len(place.told("engine", "trials", "--run", "n1")["trials"]) == 2
    assert place.told("engine", "start")["started"]
    assert len(place.told("engine", "trials")["trials"]) == 2
    assert sum(event["event"] == "weight_load" for event in read_events(place.state)) == 1


def test_another_objective_and_workload_are_another_setting(place):
    """Old trials are not handed back for them, and a workload that was changed is made anew."""
    before = yaml.safe_load(place.file.read_text())
    old = json.loads((place.state / "engine" / "n1" / "service.json").read_text())["workload"]
    place.change(objective={"maximize": "ttft"}, workload={**before["workload"], "users": 2})
    refused = place.refused("engine", "start")
    assert "another setting (objective, workload changed since); stop it first" in refused
    assert place.told("engine", "stop") == {"stopped": True}
    known = place.told("engine", "trials")
    waits = next((place.state / "engine" / "n1" / "trials").glob(f"{known['trials'][1]['id']}/result.json"))
    waits.write_text(waits.read_text()[:40])
    assert f"{waits}: is damaged" in place.refused("engine", "trials")

    assert place.told("engine", "start")["started"]
    new = json.loads((place.state / "engine" / "n1" / "service.json").read_text())["workload"]
    assert new != old and json.loads(Path(new).read_text())["users"] == 2 and Path(old).exists()
    assert waits.with_name("result.json.damaged").exists() and not waits.exists()
    assert place.told("engine", "trials")["trials"] == []
    done = place.told("engine", "submit", str(place.folder / "good"), "--wait")
    assert done["outcome"] == "passed" and done["id"] != known["trials"][0]["id"]
    figures = done["figures"]
    assert (figures["objective"], figures["better"], figures["unit"]) == ("ttft", "less", "ms")

    listed = place.told("engine", "trials")
    assert ([trial["id"] for trial in listed["trials"]], listed["others"]) == ([done["id"]], 2)
    assert listed["objective"] == "ttft" and listed["setting"] == done["setting"] != known["setting"]
    text = place.cli("engine", "trials").stdout.splitlines()
    assert len(text) == 2 and text[0].startswith("1 trials in ") and "2 under other settings (--all shows" in text[0]
    assert "times as good by ttft (less is better)" in text[1] and "tokens/s" not in text[1]
    every = place.cli("engine", "trials", "--all").stdout.splitlines()
    assert [f"[setting {known['setting']}]" in row for row in every[1:]] == [True, True, False]
    assert "output_tps (more is better)" in every[1]

    place.file.write_text(yaml.safe_dump(before))
    assert place.told("engine", "stop") == {"stopped": True} and place.told("engine", "start")["started"]
    assert json.loads((place.state / "engine" / "n1" / "service.json").read_text())["workload"] == old
    again = place.told("engine", "submit", str(place.folder / "good"), "--wait")
    assert again == known["trials"][0], "an unchanged setting goes on, and knows its trials"
    broken = place.told("engine", "submit", str(place.folder / "broken"), "--wait", code=1)
    assert broken["id"] == known["trials"][1]["id"] and broken["outcome"] == "build_error", "tried again"


def test_a_night_ends_the_engine_by_hand_and_keeps_its_own(place):
    endpoint = Endpoint.load(place.file)
    run = Run.open(place.state / "runs", "n1")
    open_search(run, endpoint)
    status = place.told("engine", "status")
    assert (status["night"], status["ready"]) == ("n1", True)
    for words in (["start"], ["stop"], ["submit", str(place.folder / "good")]):
        assert "belongs to the night n1" in place.refused("engine", *words)
    assert place.told("engine", "status")["night"] == "n1"

    def settings() -> list[str]:
        """Of each start of the night's engine."""
        return [event["setting"] for event in read_events(run.folder) if event["event"] == "service_start"]

    open_search(run, endpoint)
    assert len(settings()) == 1, "a resumed night finds its engine"
    place.change(objective={"maximize": "ttft"})
    open_search(run, Endpoint.load(place.file))
    assert len(set(settings())) == 2 and Setting.read(run.folder).objective == "ttft"
