"""`tideforge engine` where something is wrong or in the way: the model's files changed, a stop is under way, Ctrl-C, no room."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flows.test_engine_command import Place
from tideforge.engine import procfs
from tideforge.engine.claim import holder
from tideforge.engine.client import LOCK
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.events import read_events
from tideforge.engine.keepers import keeper_status
from tideforge.tasks import by_hand
from tideforge.tasks.endpoint import Endpoint

pytestmark = pytest.mark.timeout(300)
WAITS = """
import os, time

plain = build


def build(ctx):
    deadline = time.monotonic() + 25
    while not os.path.exists({go!r}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return plain(ctx)
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """With a path that no socket may have, and a run that has a profile."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        budget = {"trial_s": 60, "search_s": 20}
        place = Place(Path(folder), "s" * 120, allow_imports=["os", "time"], sandbox="off", budget=budget)
        for node in ("ingest", "profile"):
            assert place.cli("node", node, "--run", "n1").returncode == 0
        yield place
        place.told("engine", "stop", "--keeper")


def loads(place: Place) -> int:
    return sum(event["event"] == "weight_load" for event in read_events(place.state))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def begin(place: Place, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tideforge.flows.cli", *words, "--endpoint", str(place.file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def below(place: Place) -> list[int]:
    """Processes that were started with a path in the state folder."""
    found = []
    for pid in procfs.processes():
        try:
            said = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(place.state).encode() in said and procfs.runs(pid):
            found.append(pid)
    return found


def test_ctrl_c_ends_the_engine_that_was_starting(place: Place) -> None:
    start = begin(place, "engine", "start")
    until(lambda: holder(place.state / LOCK) is not None)
    start.send_signal(signal.SIGINT)
    out, err = start.communicate(timeout=100)
    assert (start.returncode, out, err.strip()) == (1, "", "tideforge: stopped")
    until(lambda: below(place) == [])
    assert place.told("engine", "status") == {"runs": False}


def test_a_start_that_fails_leaves_no_keeper_and_says_why(place: Place) -> None:
    weights = place.folder / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert f"{weights}: is truncated or malformed" in place.refused("engine", "start")
    assert below(place) == []
    weights.write_bytes(whole)


def test_a_keeper_whose_models_files_changed_makes_way(place: Place) -> None:
    assert place.told("engine", "start")["started"]
    first = keeper_status(place.state)
    assert first is not None
    assert "another service works on it already (pid" in second_service(place)
    assert place.told("engine", "stop") == {"stopped": True}
    before = loads(place)
    tiny_llama(place.folder / "model", seed=7)
    assert place.told("engine", "start")["started"]
    now = keeper_status(place.state)
    assert now is not None and now["sha256"] != first["sha256"] and not procfs.runs(first["pid"])
    assert loads(place) == before + 1
    assert place.told("engine", "submit", place.candidate("good", "\n# the same\n"), "--wait")["outcome"] == "passed"


def second_service(place: Place) -> str:
    """What a service says that is started beside the one that runs, which answers as before."""
    pid = holder(place.state / LOCK)
    command = [
        sys.executable,
        "-m",
        "tideforge.engine.service",
        "--config",
        str(place.state / "engine/n1/service.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"(pid {pid})" in done.stderr and by_hand.client(Endpoint.load(place.file)).status()["pid"] == pid
    return done.stderr


def test_what_cannot_be_submitted(place: Place) -> None:
    folder = Path(place.candidate("odd", ""))
    os.mkfifo(folder / "x.py")
    assert "x.py is no plain file" in place.refused("engine", "submit", str(folder))
    (folder / "x.py").unlink()
    (folder / "x.py").symlink_to("/etc/passwd")
    assert "x.py leads out of its folder" in place.refused("engine", "submit", str(folder))
    (folder / "x.py").unlink()
    (folder / "knobs.json").write_text('{"threads": 64}')
    error = place.refused("engine", "submit", str(folder))
    assert "tuned and are frozen: {" in error and "leave knobs.json out" in error
    assert "--timeout: nan is not" in place.refused("engine", "submit", str(folder), "--timeout", "nan")


def test_a_stop_is_seen_and_awaited(place: Place) -> None:
    go = place.folder / "go"
    slow = place.candidate("slow", WAITS.format(go=str(go)))
    waited = place.cli("engine", "submit", slow, "--wait", "--timeout", "0.5")
    assert waited.returncode == 1 and "has not ended within 0.5 s" in waited.stderr and "waits" in waited.stdout
    stop = begin(place, "engine", "stop")
    until(lambda: by_hand.is_stopping(Endpoint.load(place.file)))
    start = begin(place, "engine", "start", "--json")
    assert start.stderr is not None
    assert "waiting for the end of its running trial" in start.stderr.readline()
    assert "stopping" in place.cli("engine", "status").stdout
    error = place.refused("engine", "submit", str(place.folder / "good"))
    assert "is stopping" in error and "tideforge engine start" in error
    go.touch()
    assert stop.communicate(timeout=100)[0] == "stopped\n"
    out, err = start.communicate(timeout=100)
    assert start.returncode == 0 and '"started": true' in out and err == ""
    assert place.told("engine", "status")["ready"]


def test_the_keeper_can_be_ended(place: Place) -> None:
    assert place.told("engine", "stop", "--keeper") == {"stopped": True, "keepers": 1}
    assert keeper_status(place.state) is None
    assert place.told("engine", "stop", "--keeper") == {"stopped": False, "keepers": 0}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Place]:
    """A state folder on a file system of 4 MiB that has a run with a profile. Only root can mount one."""
    place = Place(tmp_path)
    place.state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place.state)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}; tests/engine/test_forward_files.py patches one")
    try:
        for node in ("ingest", "profile"):
            assert place.cli("node", node, "--run", "n1").returncode == 0
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place.state)], check=True, timeout=30)


def fill(folder: Path, left: int) -> None:
    """Takes all room but so many bytes."""
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    size = (folder / "ballast").stat().st_size
    os.truncate(folder / "ballast", size - left)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 8192, 16384])
def test_a_start_on_a_full_disk_says_so_and_leaves_nothing(small: Place, left: int) -> None:
    fill(small.state, left)
    error = small.refused("engine", "start")
    assert "the disk is full; free space there" in error and str(small.state) in error
    assert below(small) == [] and not list(small.state.rglob(".staging-*"))
    (small.state / "ballast").unlink()
    assert small.told("engine", "start")["started"]
    fill(small.state, 0)
    error = small.refused("engine", "submit", small.candidate("mine", "\n# mine\n"))
    assert "the disk is full; free space there" in error and str(small.state) in error
    (small.state / "ballast").unlink()
    assert small.told("engine", "submit", str(small.folder / "mine"), "--wait")["outcome"] == "passed"
    assert small.told("engine", "stop", "--keeper") == {"stopped": True, "keepers": 1}
