"""The search node's plain functions: run one agent in a process of its own, choose the finalist, sum up the trials."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tideforge.data.files import write_whole
from tideforge.engine.client import CONTROL
from tideforge.engine.guard import die_with_parent
from tideforge.engine.outcome import FAST, SLOW, Trial
from tideforge.errors import UserError
from tideforge.tasks.endpoint import AgentSpec
from tideforge.tasks.search.agent import AgentReport, AgentTask

MEANWHILE_S = 2.0
GRACE_S = 10.0  # past its deadline, an agent writes its report; then its whole process group is killed
TASK, REPORT, LOG = "task.json", "report.json", "agent.log"
# What an agent has no business with: the flow's servers and other people's keys.
HIDDEN = ("PREFECT_", "MLFLOW_", "AWS_", "GOOGLE_", "AZURE_")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSPHRASE")


def run_agent(
    spec: AgentSpec,
    workspace: Path,
    socket: Path,
    board: Path,
    deadline: float,
    *,
    dollars: float = 0.0,
    tokens: int = 0,
    sandbox: str = "prefer",
    grace_s: float = GRACE_S,
    tier: str = SLOW,
    figure: str = "output tokens/s",
    weights_bytes: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> AgentReport:
    """Runs one agent until it ends or `deadline` (seconds since the epoch) + grace_s, when it is killed with its children.

    Its candidates are measured on `tier`, by `figure`; `meanwhile` is called every MEANWHILE_S as long as it runs.

    UserError when `sandbox` is "require" and there is none for an agent that runs a model's or a stranger's commands.
    """
    begin = time.time()
    workspace.mkdir(parents=True, exist_ok=True)
    workspace, socket, board = workspace.resolve(), socket.resolve(), board.resolve()
    prefix = sandboxed(spec, workspace, socket, board, sandbox)
    task = AgentTask(
        agent=spec, workspace=workspace, socket=socket, board=board, deadline=deadline, dollars=dollars, tokens=tokens,
        tier="fast" if tier == FAST else "slow", figure=figure, weights_bytes=weights_bytes,
    )  # fmt: skip
    (workspace / REPORT).unlink(missing_ok=True)
    write_whole(workspace / TASK, task.model_dump_json(indent=1).encode())
    command = [*prefix, sys.executable, "-m", "tideforge.tasks.search.main", "--spec", str(workspace / TASK)]
    code = _until(command, spec, workspace, max(0.0, deadline + grace_s - time.time()), meanwhile)
    return ended(spec, workspace, code, time.time() - begin)


def _until(
    command: list[str], spec: AgentSpec, workspace: Path, timeout_s: float, meanwhile: Callable[[], object]
) -> int | None:
    """The exit code, or None when the kill timer ended it. Nothing of its process group is left behind."""
    with (workspace / LOG).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=workspace,
            env=environment(spec),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            return _wait(process, time.monotonic() + timeout_s, meanwhile)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], deadline: float, meanwhile: Callable[[], object]) -> int | None:
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, MEANWHILE_S))
        meanwhile()
    return None


def ended(spec: AgentSpec, workspace: Path, code: int | None, seconds: float) -> AgentReport:
    """The agent's own report where there is one; how its process ended in any case."""
    path = workspace / REPORT
    if code == 0 and path.is_file():
        report = AgentReport.model_validate_json(path.read_bytes())
        return report.model_copy(update={"exit_code": code, "seconds": seconds})
    reason = "killed" if code is None else "misconfigured" if code == 2 else "crashed"
    lines = (workspace / LOG).read_text(errors="replace").strip().splitlines()
    message = "it outlived its deadline" if code is None else (lines[-1][:500] if lines else "no output")
    return AgentReport(name=spec.name, kind=spec.kind, reason=reason, message=message, exit_code=code, seconds=seconds)


def environment(spec: AgentSpec) -> dict[str, str]:
    """The caller's variables without the flow's addresses and without any secret but the agent's own key."""
    own = {spec.api_key_env} if spec.kind != "offline" else set()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in own or (not name.startswith(HIDDEN) and not any(word in name.upper() for word in SECRET))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def sandboxed(spec: AgentSpec, workspace: Path, socket: Path, board: Path, sandbox: str) -> list[str]:
    """The command that goes in front of an agent's: bubblewrap with a read-only root, or nothing.

    Of the state folder's sockets an agent sees the one it is given: neither the service's control nor the keeper's.
    """
    if spec.kind == "offline" or sandbox == "off":
        return []
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        if sandbox == "require":
            remedy = "install Debian's bubblewrap, or set `sandbox: prefer` and accept an agent without one"
            raise UserError("bwrap", f"is not on PATH, and the endpoint requires a sandbox for {spec.name}", remedy)
        return []
    board.touch()
    state = socket.parent
    hidden = ["--tmpfs", str(state / CONTROL.parent)] if (state / CONTROL.parent).is_dir() else []
    if (state / "keeper.sock").exists():  # it hands out memory that others compute with
        hidden += ["--ro-bind", "/dev/null", str(state / "keeper.sock")]
    places = [("--bind", workspace), ("--bind", board), ("--ro-bind", socket)]
    binds = [word for option, path in places for word in (option, str(path), str(path))]
    python = [str(Path(sys.prefix)), str(Path(__file__).resolve().parents[2])]
    readable = [word for path in python for word in ("--ro-bind", path, path)]
    shell = [
        "--unshare-all",
        "--share-net",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--tmpfs",
        "/tmp",
    ]
    return [bwrap, *shell, *hidden, *readable, *binds, "--chdir", str(workspace), "--"]


def finalist(trials: Sequence[Trial]) -> Trial | None:
    """The one candidate that is verified: of those that surely gain on the slow tier, the one with the best lower bound."""
    gains = [t for t in trials if t.tier == SLOW and t.figures is not None and t.figures.ci_low > 1]
    return max(gains, key=lambda trial: trial.figures.ci_low if trial.figures else 0.0, default=None)


@dataclasses.dataclass(frozen=True)
class Summary:
    candidates: int  # different forwards
    finished: int
    outcomes: dict[str, int]
    best: Trial | None


def summary(trials: Sequence[Trial]) -> Summary:
    outcomes = collections.Counter(str(trial.outcome) for trial in trials if trial.outcome is not None)
    return Summary(
        candidates=len({trial.forward for trial in trials}),
        finished=sum(outcomes.values()),
        outcomes=dict(sorted(outcomes.items())),
        best=finalist(trials),
    )
