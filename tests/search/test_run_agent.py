"""One agent as a process: how it ends is observed, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tideforge.engine import protocol
from tideforge.engine.client import CONTROL, SOCKET
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.errors import PeerGone, UserError
from tideforge.tasks.endpoint import AgentSpec
from tideforge.tasks.search import ask
from tideforge.tasks.search.agent import AgentReport
from tideforge.tasks.search.board import Board
from tideforge.tasks.search.search import environment, finalist, run_agent, sandboxed, summary


class SocketEngine:
    """Speaks the engine's protocol on a Unix socket for a FakeEngine."""

    def __init__(self, engine: Any, path: Path) -> None:
        self.engine, self.path = engine, path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.settimeout(0.1)
        self.closing = threading.Event()
        self.pause_s = 0.0  # before a submission is taken
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.closing.is_set():
            try:
                peer, _ = self.listener.accept()
            except TimeoutError:
                continue
            with peer:
                peer.settimeout(10)
                try:
                    protocol.send(peer, {"type": "answer", **self.answer(protocol.recv(peer, 10).header)})
                except (PeerGone, BrokenPipeError):
                    continue

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        from tideforge.engine.forward import Forward

        if ask["type"] == "submit":
            time.sleep(self.pause_s)
            return {"id": self.engine.submit(Forward(ask["files"]), ask["tier"], ask["submitter"])}
        if ask["type"] == "trials":
            return {"trials": [trial.to_json() for trial in self.engine.trials()]}
        if ask["type"] == "source":
            return {"files": self.engine.source()}
        if ask["type"] == "incumbent":
            return {"files": dict(self.engine.incumbent().files)}
        return {"trial": self.engine.trial(ask["id"]).to_json()}

    def close(self) -> None:
        self.closing.set()
        self.thread.join(10)
        self.listener.close()


@pytest.fixture
def engine(llama: Any, tmp_path: Path) -> Iterator[SocketEngine]:
    served = SocketEngine(llama.engine(lambda text: 1.1), tmp_path / "e.sock")
    yield served
    served.close()


def command(*words: str) -> AgentSpec:
    return AgentSpec(kind="command", name="c", command=list(words))


def start(spec: AgentSpec, engine: SocketEngine, tmp_path: Path, seconds: float, **more: Any) -> AgentReport:
    return run_agent(
        spec, tmp_path / "work", engine.path, tmp_path / "board.jsonl", time.time() + seconds, sandbox="off", **more
    )


def test_an_offline_agent_searches_until_its_deadline(engine: SocketEngine, tmp_path: Path) -> None:
    engine.pause_s = 2  # so that it does not run out of what to try
    report = start(AgentSpec(name="o", seed=3), engine, tmp_path, 15)
    assert (report.reason, report.exit_code, report.kind) == ("deadline", 0, "offline")
    trials = engine.engine.trials()
    assert len(trials) >= 2 and {trial.submitter for trial in trials} == {"o"}
    assert {post.author for post in Board(tmp_path / "board.jsonl").posts()} == {"o"}


ASKS = """
import os, pathlib, subprocess, sys
folder = pathlib.Path(os.environ["TIDEFORGE_INCUMBENT"])
text = (folder / "forward.py").read_text()
new = pathlib.Path("new"); new.mkdir(); (new / "forward.py").write_text("# mine\\n" + text)
(new / "knobs.json").write_text((folder / "knobs.json").read_text())
for words in (["submit", "new"], ["results"], ["post", "note", "hello"], ["board"]):
    subprocess.run([sys.executable, "-m", "tideforge.tasks.search.ask", *words], check=True)
"""


def test_a_command_submits_from_its_workspace(engine: SocketEngine, tmp_path: Path) -> None:
    report = start(command(sys.executable, "-c", ASKS), engine, tmp_path, 60)
    assert (report.reason, report.message) == ("done", "the command ended with code 0")
    assert [str(trial.outcome) for trial in engine.engine.trials()] == ["passed"]
    assert [post.text for post in Board(tmp_path / "board.jsonl").posts()] == ["hello"]


def test_a_command_is_ended_at_the_deadline(engine: SocketEngine, tmp_path: Path) -> None:
    report = start(command("sleep", "300"), engine, tmp_path, 6)
    assert report.reason == "deadline"


STUBBORN = """
import os, signal, subprocess, pathlib, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"])
pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
os.kill(os.getppid(), signal.SIGSTOP)
time.sleep(300)
"""


def test_something_can_be_done_while_an_agent_runs(engine: SocketEngine, tmp_path: Path) -> None:
    calls: list[float] = []
    report = start(command("sleep", "4"), engine, tmp_path, 60, meanwhile=lambda: calls.append(time.time()))
    assert report.reason == "done" and 1 <= len(calls) <= 5


def test_a_command_submits_on_the_tier_that_it_is_given(engine: SocketEngine, tmp_path: Path) -> None:
    assert start(command(sys.executable, "-c", ASKS), engine, tmp_path, 60, tier="fast").reason == "done"
    assert [trial.tier for trial in engine.engine.trials()] == ["fast"]


def test_what_outlives_its_deadline_is_killed_with_its_children(engine: SocketEngine, tmp_path: Path) -> None:
    report = start(command(sys.executable, "-c", STUBBORN), engine, tmp_path, 6, grace_s=1.0)
    assert (report.reason, report.exit_code) == ("killed", None)
    for pid in (tmp_path / "work" / "pids").read_text().split():
        for _ in range(50):
            if gone(int(pid)):
                break
            time.sleep(0.1)
        assert gone(int(pid))


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be reaped by init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_bad_agents_are_reported_with_their_reason(engine: SocketEngine, tmp_path: Path) -> None:
    missing = start(AgentSpec(kind="llm", name="l", model="m", api_key_env="NO_SUCH_KEY"), engine, tmp_path, 30)
    assert (missing.reason, missing.exit_code) == ("misconfigured", 2)
    assert "NO_SUCH_KEY: is not set" in missing.message
    absent = start(command("no-such-program-anywhere"), engine, tmp_path, 30)
    assert absent.reason == "misconfigured" and "cannot be started" in absent.message
    crashed = start(command(sys.executable, "-c", "import os; os.kill(os.getppid(), 9)"), engine, tmp_path, 30)
    assert (crashed.reason, crashed.exit_code) == ("crashed", -9)


def test_a_required_sandbox_that_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    places = (tmp_path, tmp_path / "s", tmp_path / "b")
    with pytest.raises(UserError, match="bwrap"):
        sandboxed(command("x"), *places, "require")
    assert sandboxed(command("x"), *places, "prefer") == []
    assert sandboxed(AgentSpec(), *places, "require") == []


def test_a_sandbox_gives_write_access_to_workspace_and_board_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = sandboxed(command("x"), tmp_path / "w", tmp_path / "s", tmp_path / "b", "require")
    writable = [words[i + 1] for i, word in enumerate(words) if word == "--bind"]
    assert writable == [str(tmp_path / "w"), str(tmp_path / "b")]
    assert words[words.index("/") - 1] == "--ro-bind" and "--unshare-all" in words


def listening(path: Path) -> socket.socket:
    path.parent.mkdir(exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_a_sandbox_hides_what_ends_the_engine_and_what_hands_out_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    control, keeper = tmp_path / "s" / CONTROL.parent, tmp_path / "s" / "keeper.sock"
    places = (tmp_path / "w", tmp_path / "s" / SOCKET, tmp_path / "b")
    assert not {str(control), str(keeper)} & set(sandboxed(command("x"), *places, "require"))
    control.mkdir(parents=True)
    keeper.touch()
    words = sandboxed(command("x"), *places, "require")
    assert words[words.index(str(control)) - 1] == "--tmpfs" and words[words.index(str(keeper)) - 1] == "/dev/null"
    assert words.index("/") < words.index(str(control)), "hidden after the root is shown"


KNOCKS = """
import pathlib, socket, sys
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
            print("open")
        except OSError as error:
            print("shut")
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_in_a_real_sandbox_only_the_agents_socket_answers() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, contextlib.ExitStack() as stack:  # /tmp is empty inside
        state, work = Path(folder) / "s", Path(folder) / "w"
        paths = [state / SOCKET, state / CONTROL, state / "keeper.sock"]
        work.mkdir()
        for path in paths:
            stack.enter_context(listening(path))
        prefix = sandboxed(command("x"), work, paths[0], Path(folder) / "b", "require")
        knock = [*prefix, sys.executable, "-c", KNOCKS, *map(str, paths)]
        done = subprocess.run(knock, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["open", "shut", "shut"], done.stderr


def test_agents_see_neither_the_flow_nor_others_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "OTHER_API_KEY", "OWN_KEY", "HARMLESS"):
        monkeypatch.setenv(name, "x")
    llm = environment(AgentSpec(kind="llm", api_key_env="OWN_KEY"))
    assert {"OWN_KEY", "HARMLESS"} <= llm.keys()
    assert not {"PREFECT_API_URL", "MLFLOW_TRACKING_URI", "OTHER_API_KEY"} & llm.keys()
    assert "OWN_KEY" not in environment(AgentSpec(kind="offline", api_key_env="OWN_KEY"))


def trial(name: str, outcome: Outcome | None, ratio: float = 1.0, low: float = 1.0) -> Trial:
    figures = Figures(ratio, low, 2 * ratio - low, 4, 1.0, 1.0, 1.0, 1.0, 1.0) if outcome is Outcome.PASSED else None
    return Trial(name, f"f{name}", "slow", "a", 0.0, outcome, figures=figures)


def test_finalist_and_summary() -> None:
    passed, wrong = Outcome.PASSED, Outcome.WRONG
    trials = [
        trial("a", passed, 1.5, 0.9),
        trial("b", passed, 1.2, 1.15),
        trial("c", passed, 1.3, 1.1),
        trial("d", wrong),
        trial("e", None),
    ]
    best = finalist(trials)
    assert best is not None and best.id == "b"
    assert finalist([trials[0], trials[3]]) is None and finalist([]) is None
    screened = dataclasses.replace(trial("f", passed, 2.0, 1.9), tier="fast")
    assert finalist([*trials, screened]) == best and finalist([screened]) is None
    told = summary(trials)
    assert (told.candidates, told.finished, told.outcomes) == (5, 4, {"passed": 3, "wrong": 1})


def test_ask_needs_its_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TIDEFORGE_SOCKET", raising=False)
    assert ask.main(["results"]) == 2
    assert "TIDEFORGE_SOCKET is not set" in capsys.readouterr().err
