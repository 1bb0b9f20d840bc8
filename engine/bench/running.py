"""A service of this engine's own, as a night has it: started, asked through its queue, watched, ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import procfs
from tideforge.engine.bench.job import MODELS, Job, Load
from tideforge.engine.bench.report import Reading, Record
from tideforge.engine.client import EngineClient, EngineControl
from tideforge.engine.events import FILE, read_events
from tideforge.engine.forward import Forward
from tideforge.engine.guard import has_ended
from tideforge.engine.lab import end_keeper, keeper_status
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.tied import end_tied, start_tied
from tideforge.errors import TideforgeError, UserError

READY_S = 300.0
TRIAL_S = 120.0  # one trial, at most, its wait for the others not counted
END_S = 60.0
IDLE_S = 30.0
WAITING = 8  # candidates in the queue behind the one that is measured
IMPORTS = (
    "ctypes", "gc", "mmap", "os", "pathlib", "signal", "struct", "subprocess", "swiglu", "sys", "tempfile", "threading",
    "time",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a part's service differs from a night's."""

    load: Load
    trial_s: float = 30.0
    noise_trials: int = 0
    worker_memory_bytes: int = 0


class Turns:
    """When the service took up each trial: read from its events, of which only the new ones are looked at."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._known: dict[str, float] = {}

    def of(self, trial: str, otherwise: float) -> float:
        with self._path.open("rb") as file:
            file.seek(self._at)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._at += len(lines)
        for line in lines.splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "trial_start":
                    self._known[event["trial"]] = event["time"]
        return self._known.get(trial, otherwise)


@dataclasses.dataclass
class Running:
    """The service's client, its folder, and which start of the part this is."""

    client: EngineClient
    state: Path
    run: int
    plain: Forward
    started_at: float  # when its processes were started; the model lay on the disk
    turns: Turns

    def submit(self, forward: Forward, tier: str = "slow") -> str:
        return self.client.submit(forward, tier, "bench")

    def ended(self, name: str, label: str, timeout_s: float = TRIAL_S) -> Reading:
        """The trial's reading. Raises TideforgeError when it does not end in time: it counts as lost."""
        trial = self.client.wait(name, timeout_s)
        if not trial.done:
            raise TideforgeError(f"{name} ({label}) has not ended within {timeout_s:g} s; see {self.state}/service.log")
        return Reading(label, self.run, trial, self.turns.of(name, trial.submitted_at))

    def measured(self, forward: Forward, label: str, tier: str = "slow") -> Reading:
        """One trial, alone in the queue, and the machine after it."""
        return self.watched(self.ended(self.submit(forward, tier), label))

    def watched(self, reading: Reading) -> Reading:
        pids = self.pids
        return dataclasses.replace(
            reading, device_mib=device_mib(), host_mib=sum(map(procfs.memory_bytes, pids)) / (1 << 20),
            descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids), threads=sum(map(procfs.threads, pids)),
        )  # fmt: skip

    def idle_mib(self) -> float:
        """Device memory once all spares stand by and nothing runs: the same three times in a row, or as it is after a while."""
        last = [device_mib()]
        deadline = time.monotonic() + IDLE_S
        while time.monotonic() < deadline and not (len(last) > 2 and last[-1] == last[-2] == last[-3]):
            time.sleep(1.0)
            last.append(device_mib())
        return last[-1]

    @property
    def pids(self) -> Sequence[int]:
        keeper = keeper_status(self.state)
        return [int(self.client.status()["pid"]), *([int(keeper["pid"])] if keeper else [])]

    def feed(
        self, record: Record, forwards: Iterable[Forward], tier: str, labels: Iterable[str], more: Callable[[], bool]
    ) -> float:
        """Trials of all of them, with some always waiting, while `more()`; seconds from the first one's turn to the last end."""
        waiting: deque[tuple[str, str]] = deque()
        done: list[Reading] = []

        def take() -> None:
            name, label = waiting.popleft()
            done.append(self.ended(name, label, WAITING * TRIAL_S))
            record.add_trial(done[-1])

        for forward, label in zip(forwards, labels, strict=False):
            if not more():
                break
            waiting.append((self.submit(forward, tier), label))
            if len(waiting) > WAITING:
                take()
        while waiting:
            take()
        return max(r.ended_at for r in done) - min(r.turn_at for r in done) if done else 0.0

    def events(self, kind: str) -> int:
        return sum(event["event"] == kind for event in read_events(self.state))


def written(job: Job, plan: Plan, state: Path) -> Path:
    """The service's configuration and workload, random token ids for text: it has no say in how long a step takes."""
    load, settings = plan.load, job.settings(plan.load, state)
    settings = dataclasses.replace(settings, worker_memory_bytes=plan.worker_memory_bytes)
    vocabulary = json.loads((settings.model / "config.json").read_text())["vocab_size"]
    corpus = tuple(np.random.default_rng(1).integers(3, vocabulary, 4 * (load.prompt + 1000)).tolist())
    shapes = (RequestShape(load.prompt, load.output),) * load.users
    state.mkdir(parents=True, exist_ok=True)
    (state / "workload.json").write_text(Workload(load.users, shapes, shapes, corpus, "", 0).to_json())
    config = ServiceConfig(
        settings, state, MODELS / load.forward, state / "workload.json", passes=load.passes, trial_s=plan.trial_s,
        allow_imports=IMPORTS, tune=False, noise_trials=plan.noise_trials if job.on_gpu else 0,
        exit_at=time.time() + max(60.0, job.left_s) + READY_S,
    )  # fmt: skip
    config.write(state / "service.json")
    return state / "service.json"


@contextlib.contextmanager
def running(job: Job, record: Record, plan: Plan) -> Iterator[Running]:
    """A service in a folder of its own with empty caches; keeper and folder end with it. The folder stays after an error.

    A call that is stopped, or killed, ends both at once, whatever trial runs.
    """
    record.add("start")
    run = len(record.of("start"))
    state = job.state / f"{record.part}-{run}"
    shutil.rmtree(state, ignore_errors=True)
    config = written(job, plan, state)
    command = [sys.executable, "-m", "tideforge.engine.supervise", "--config", str(config)]
    begin, pid = time.time(), start_tied(command, state / "supervise.log")
    try:
        client = EngineClient(state / "engine.sock", patience_s=END_S)
        _await_ready(client, pid, state)
        yield Running(client, state, run, client.incumbent(), begin, Turns(state / FILE))
    except (KeyboardInterrupt, SystemExit):
        end_tied(pid)
        raise
    finally:
        stop(state, pid)
    shutil.rmtree(state, ignore_errors=True)


def _await_ready(client: EngineClient, pid: int, state: Path) -> None:
    """Raises TideforgeError as soon as the service has ended, or is not ready in time."""
    impatient, deadline = EngineClient(client.path, patience_s=0.0), time.monotonic() + READY_S
    while time.monotonic() < deadline and not has_ended(pid):
        with contextlib.suppress(UserError):  # nobody listens yet
            if impatient.queue().ready:
                return
        time.sleep(0.02)
    raise TideforgeError(f"the service does not get ready; see {state / 'service.log'}")


def stop(state: Path, pid: int) -> None:
    """Ends the service after its running trial, and the keeper."""
    if not has_ended(pid):
        with contextlib.suppress(TideforgeError, OSError):
            EngineControl(state, patience_s=5).stop()
    deadline = time.monotonic() + END_S
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    end_tied(pid)
    with contextlib.suppress(OSError):
        end_keeper(state)


def device_mib() -> float:
    """In use on the GPU, by whatever process; 0.0 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / (1 << 20)
