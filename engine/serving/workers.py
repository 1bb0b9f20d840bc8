"""Which process runs which forward in the server: start, replacement after a failure, end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tideforge.engine.config import Settings
from tideforge.engine.events import log_event
from tideforge.engine.executor import Executor, RemoteExecutor, Sampled
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab
from tideforge.engine.serving.rehearsal import rehearse
from tideforge.errors import CandidateError, TideforgeError

RESTARTS = 3  # of one forward
RESTART_WINDOW_S = 120.0
STEP_S = 60.0
PROBATION_STEP_S = 10.0  # a step of a forward that is being staged holds up live requests at most this long


def set_patience(executor: Executor, step_timeout_s: float) -> None:
    if isinstance(executor, RemoteExecutor):
        executor.step_timeout_s = step_timeout_s


class Workers(Protocol):
    """Where executors come from. `start` raises CandidateError when the forward does not get that far."""

    @property
    def weights_sha256(self) -> str: ...
    def start(self, forward: Forward) -> Executor: ...
    def end(self, executor: Executor) -> None: ...
    def close(self) -> None: ...


class LabWorkers:
    """Worker processes on the keeper's memory. All of them share the pages of the live server; each has logits of its own,
    because a worker that is being started runs steps while another one serves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._labs = {settings: Lab(settings, private_logits=True)}
        self._lab = self._labs[settings]
        self._arena = self._lab.arena("server")
        self._owners: dict[int, Lab] = {}

    @property
    def weights_sha256(self) -> str:
        return self._lab.weights_sha256

    def start(self, forward: Forward) -> Executor:
        """Under the forward's own knobs. Another block size would need other memory: refused on a live server."""
        settings = self._settings.with_knobs(forward.knobs)
        if settings not in self._labs:
            self._labs[settings] = Lab(settings, private_logits=True)
        lab = self._labs[settings]
        if lab.layout != self._lab.layout:
            raise CandidateError("refused", "its knobs change the KV layout: that needs a restart, not a ship")
        worker = lab.spawn(forward, self._arena)
        try:
            lab.capture(worker, sampling=True)
            if settings.device != "cpu":  # there nothing is compiled
                rehearse(worker, forward.id, settings)
                lab.keep_kernels(forward)  # the next worker of it need not compile again
        except CandidateError:
            lab.release(worker)
            raise
        self._owners[id(worker)] = lab
        return worker

    def end(self, executor: Executor) -> None:
        if isinstance(executor, RemoteExecutor):
            self._owners.pop(id(executor)).release(executor)

    def close(self) -> None:
        for lab in self._labs.values():
            lab.close()


class Fleet:
    """The forwards that are up, with their sources, so that a dead worker can be replaced by one of the same bytes."""

    def __init__(self, workers: Workers, state: Path) -> None:
        self.workers, self._state = workers, state
        self._members: dict[str, tuple[Forward, Executor]] = {}
        self._staging: set[str] = set()
        self._restarts: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def start(self, forward: Forward) -> Executor:
        """A worker under probation: until `confirm` it is not replaced when it fails."""
        executor = self.workers.start(forward)
        set_patience(executor, PROBATION_STEP_S)
        with self._lock:
            self._members[forward.id] = (forward, executor)
            self._staging.add(forward.id)
        return executor

    def confirm(self, forward_id: str) -> None:
        with self._lock:
            self._staging.discard(forward_id)
            set_patience(self._members[forward_id][1], STEP_S)

    def end(self, forward_id: str) -> None:
        with self._lock:
            member = self._members.pop(forward_id, None)
            self._staging.discard(forward_id)
        if member is not None:
            self.workers.end(member[1])

    def replace(self, forward_id: str, error: TideforgeError) -> Executor | None:
        """EngineCore's on_failure. None when the forward is on probation or fails again and again."""
        log_event(self._state, "worker_failed", forward=forward_id, error=str(error))
        with self._lock:
            forward, old = self._members[forward_id]
            self._restarts = [one for one in self._restarts if one[0] > time.monotonic() - RESTART_WINDOW_S]
            spent = sum(1 for _, name in self._restarts if name == forward_id)
            if forward_id in self._staging or spent >= RESTARTS:
                return None
            self._restarts.append((time.monotonic(), forward_id))
        self.workers.end(old)
        executor: Executor
        try:
            executor = self.workers.start(forward)
        except TideforgeError as failure:
            log_event(self._state, "worker_failed", forward=forward_id, error=str(failure))
            executor = Dead()  # the old one is closed and must not be used again
        with self._lock:
            self._members[forward_id] = (forward, executor)
        return executor


class Dead:
    """Stands for a worker that could not be started again; using it fails, which tries a start again."""

    def execute(self, step: object) -> Iterable[Sampled]:
        raise CandidateError("exited", "the worker is gone")

    def halt(self) -> None:
        pass
