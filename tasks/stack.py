"""Starts and ends the processes of one endpoint on one machine: Prefect, MLflow, the HTTP server, a Prefect worker.

Each one is a session of its own and logs to `<state>/logs/`. `<state>/stack.json` keeps addresses, process ids and
start times, so that `down` ends what `up` started and nothing else. Prefect's home lies in the state folder: a user's
own profile is neither read nor written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

import tideforge
from tideforge.data.files import read_json
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.machine import worker_cpus

POOL = "tideforge"
READY_S = 240.0
QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_LOGGING_COLORS": "false",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}


@dataclasses.dataclass(frozen=True)
class Process:
    name: str
    pid: int
    started: float  # seconds since the epoch, as the kernel has it: a reused pid has another one
    log: str
    ready: str = ""  # URL that answers once the process is up

    @property
    def alive(self) -> bool:
        import psutil

        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 0.5 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclasses.dataclass(frozen=True)
class Stack:
    prefect: str  # base URL without /api
    mlflow: str
    server: str
    endpoint: str  # path of the endpoint file
    processes: tuple[Process, ...] = ()

    @property
    def prefect_api(self) -> str:
        return f"{self.prefect}/api"

    def save(self, state: Path) -> None:
        temporary = state / ".stack.json.tmp"
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        temporary.rename(state / "stack.json")

    @classmethod
    def read(cls, state: Path) -> Stack | None:
        """None when nothing was ever started for this state folder."""
        remedy = "end what it named by hand and remove it"
        try:
            return read_json(state / "stack.json", cls._of, remedy)
        except FileNotFoundError:
            return None

    @classmethod
    def _of(cls, raw: Mapping[str, Any]) -> Stack:
        return cls(**{**raw, "processes": tuple(Process(**one) for one in raw["processes"])})


def free_port(preferred: int) -> int:
    """`preferred` if nobody listens there, else one that the kernel picks. Loopback only."""
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise UserError("127.0.0.1", "has no free port", "stop a program that listens there")


def environment(state: Path, stack: Stack | None = None) -> dict[str, str]:
    """Environment of every process of the stack. Without a stack: what a local run needs."""
    state = state.resolve()
    packages = str(Path(tideforge.__file__).resolve().parent.parent)
    extra = {**QUIET, "PREFECT_HOME": str(state / "prefect"), "TIDEFORGE_ROOT": str(Path.cwd())}
    if stack:
        extra |= {
            "PREFECT_API_URL": stack.prefect_api,
            "PREFECT_UI_URL": stack.prefect,
            "TIDEFORGE_ENDPOINT": stack.endpoint,
        }
    path = os.pathsep.join(part for part in (packages, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, **extra, "PYTHONPATH": path}


def use(state: Path) -> Stack | None:
    """Points this process at the stack's Prefect, before prefect is imported. None when there is no stack."""
    stack = Stack.read(state)
    extra = environment(state, stack)
    names = [*QUIET, "PREFECT_HOME", "PREFECT_API_URL", "PREFECT_UI_URL"]
    os.environ.update({name: extra[name] for name in names if name in extra})
    return stack


def spawn(name: str, command: Sequence[str], state: Path, env: Mapping[str, str], ready: str = "") -> Process:
    """Starts a process in a session of its own that outlives this one. command[0] is a path."""
    import psutil

    log = state / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(command[0], list(command), dict(env), file_actions=actions, setsid=True)
    return Process(name, pid, psutil.Process(pid).create_time(), str(log), ready)


def wait_ready(process: Process, timeout_s: float = READY_S) -> None:
    """Raises UserError that names the log when the process ends or does not answer in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not process.alive:
            raise UserError(process.name, f"ended while starting ({_last_line(process.log)})", f"read {process.log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(process.ready, timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    raise UserError(process.name, f"did not answer at {process.ready} in {timeout_s:.0f} s", f"read {process.log}")


def _last_line(path: str) -> str:
    lines = [line for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it printed nothing"


def commands(stack: Stack, state: Path, tracking_uri: str) -> dict[str, tuple[list[str], str]]:
    """name -> (command, URL that answers when it is up), in the order of starting."""
    python = [sys.executable, "-m"]

    def port(url: str) -> str:
        return url.rsplit(":", 1)[1]

    artifacts = str(state / "mlartifacts")
    mlflow = ["server", "--backend-store-uri", tracking_uri, "--artifacts-destination", artifacts, "--workers", "1"]
    return {
        "prefect": (
            [*python, "prefect", "server", "start", "--host", "127.0.0.1", "--port", port(stack.prefect)],
            f"{stack.prefect}/api/health",
        ),
        "server": (
            [*python, "tideforge.flows.cli", "serve", "--endpoint", stack.endpoint, "--port", port(stack.server)],
            f"{stack.server}/version",
        ),
        "mlflow": (
            [*python, "mlflow", *mlflow, "--host", "127.0.0.1", "--port", port(stack.mlflow)],
            f"{stack.mlflow}/health",
        ),
        "worker": (
            [*python, "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", "tideforge-1"],
            f"{stack.prefect}/api/work_pools/{POOL}",
        ),
    }


def up(endpoint_file: Path, endpoint: Endpoint, env: Mapping[str, str] | None = None) -> Stack:
    """Starts what does not run yet, waits until it answers, deploys the flows. Running again mends what died."""
    state = endpoint.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    stack = _addresses(Stack.read(state), endpoint_file.resolve())
    full_env = {**environment(state, stack), **(env or {})}
    tracking = f"sqlite:///{state / 'mlflow.db'}"
    running = {process.name: process for process in stack.processes if process.alive}
    for name, (command, ready) in commands(stack, state, tracking).items():
        if name == "mlflow" and endpoint.tracking_uri:
            stack = dataclasses.replace(stack, mlflow=endpoint.tracking_uri)
            continue  # the user has an MLflow of their own
        if name == "worker":
            wait_ready(running["prefect"])
        if name not in running:
            running[name] = spawn(name, command, state, full_env, ready)
        stack = dataclasses.replace(stack, processes=tuple(running.values()))
        stack.save(state)  # after each start: an interrupted `up` leaves nothing that `down` cannot end
    wait_ready(running["worker"])
    deploy(state, full_env)  # while the server still loads its weights
    for process in running.values():
        wait_ready(process)
        keep_off(process.pid, worker_cpus())
    return stack


def keep_off(pid: int, cores: Sequence[int]) -> None:
    """Moves a process, its threads and its children off `cores`: the measuring worker has them to itself.

    Workers stay: they are pinned there, and only one of them is active at a time.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            if "tideforge.engine.worker" not in one.cmdline():
                for thread in one.threads():
                    os.sched_setaffinity(thread.id, set(os.sched_getaffinity(thread.id)) - set(cores) or {0})


def _addresses(old: Stack | None, endpoint_file: Path) -> Stack:
    """Keeps the ports of an earlier `up`, so that addresses in open browser tabs and in deployments stay true."""
    if old and any(process.alive for process in old.processes):
        if old.endpoint != str(endpoint_file):
            raise UserError(
                old.endpoint, "already uses this state folder", "run tideforge down first, or give another state"
            )
        return old

    def at(url: str | None, default: int) -> str:
        wanted = int(url.rsplit(":", 1)[1]) if url and url.rsplit(":", 1)[1].isdigit() else default
        return f"http://127.0.0.1:{free_port(wanted)}"

    known = (old.prefect, old.mlflow, old.server) if old else (None, None, None)
    return Stack(at(known[0], 4200), at(known[1], 5000), at(known[2], 8000), str(endpoint_file))


def prefect_file() -> Path:
    """deployments/prefect.yaml of the folder that the command runs in, else of this checkout."""
    for root in (Path.cwd(), Path(tideforge.__file__).resolve().parent.parent):
        if (root / "deployments" / "prefect.yaml").is_file():
            return root / "deployments" / "prefect.yaml"
    raise UserError(
        "deployments/prefect.yaml", "is not here", "run the command in a clone of the project, or copy that file"
    )


def deploy(state: Path, env: Mapping[str, str]) -> None:
    """Registers flows, schedule and trigger with the Prefect server that `env` names."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(prefect_file())]
    result = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=180, check=False)
    log = state / "logs" / "deploy.log"
    log.write_text(result.stdout + result.stderr)
    if result.returncode:
        raise UserError("prefect deploy", f"failed ({_last_line(str(log))})", f"read {log}")


def down(state: Path) -> list[str]:
    """Ends what `up` started and is still the same process, latest first, then the engine it left; returns the names."""
    state = state.resolve()
    stack = Stack.read(state)
    if stack is None:
        return []
    ended = [process.name for process in reversed(stack.processes) if stop(process)]
    ended += stop_engine(state)
    dataclasses.replace(stack, processes=()).save(state)
    return ended


def stop_engine(state: Path) -> list[str]:
    """Ends a night's service and the keepers of this state folder. All are found by their sockets in it."""
    import psutil

    from tideforge.engine.client import EngineControl
    from tideforge.engine.lab import keeper_folders, keeper_status
    from tideforge.errors import ProtocolError

    ended = []
    with contextlib.suppress(UserError, ProtocolError, OSError):  # nobody answers: nothing to stop
        EngineControl(state, patience_s=0).stop()
        ended.append("service")
    for folder in keeper_folders(state):
        if (status := keeper_status(folder)) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                keeper = psutil.Process(int(status["pid"]))
                stop(Process("keeper", keeper.pid, keeper.create_time(), str(folder / "logs" / "keeper.log")))
                ended.append("keeper")
    return ended


def stop(process: Process, grace_s: float = 15.0) -> bool:
    """Ends the process, its session and its descendants. False when it was gone or its pid is somebody else's."""
    import psutil

    if not process.alive:
        return False
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(family, timeout=grace_s)
    for one in stubborn:  # psutil checks the start time again before it signals
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(stubborn, timeout=5)
    return True
