"""The service: owns queue, clock, archive and truth of one night. Runs no candidate code and imports no torch.

`python -m tideforge.engine.service --config FILE`. Killed and started again it goes on where it was: finished trials are
in the archive, waiting ones are evaluated, the one that was running is evaluated again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tideforge.engine import protocol
from tideforge.engine.archive import Archive, write_atomic
from tideforge.engine.client import CONTROL, SOCKET
from tideforge.engine.evaluate import Bench
from tideforge.engine.events import log_event, read_events
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.service_config import ServiceConfig
from tideforge.errors import CandidateError, PeerGone, ProtocolError

WAIT_SLICE_S = 10.0
MAX_BEGINNINGS = 3  # of one trial: a candidate that the service does not survive must not hold up the others for ever

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Service:
    """Answers clients in threads; evaluates trials one after another in the thread that calls `run`."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config, self.night = config, config.night
        self.archive = Archive(self.night, config.settings.state / "forwards")
        self.changed = threading.Condition()
        self.running: str | None = None
        self.stopping = False
        self.begun = collections.Counter(e["trial"] for e in read_events(self.night) if e["event"] == "trial_start")
        self.bench: Bench | None = None

    def run(self) -> None:
        log_event(self.night, "service_start", waiting=len(self.archive.waiting))
        state = self.config.settings.state
        with listen(state / SOCKET) as agents, listen(state / CONTROL) as control:
            for listener, answer in ((agents, self.answer), (control, self.control)):
                threading.Thread(target=self._accept, args=(listener, answer), daemon=True).start()
            with contextlib.closing(Bench(self.config)) as bench:
                with self.changed:
                    self.bench = bench
                    self.changed.notify_all()
                log_event(self.night, "service_ready", incumbent=bench.incumbent.id, knobs=bench.incumbent.knobs)
                while (trial := self._next()) is not None:
                    self._evaluate(bench, trial)

    def _next(self) -> Trial | None:
        with self.changed:
            while not self.stopping:
                if waiting := self.archive.waiting:
                    self.running = waiting[0].id
                    return waiting[0]
                if self.config.exit_at is not None and time.time() > self.config.exit_at:
                    return None
                self.changed.wait(1.0)
            return None

    def _evaluate(self, bench: Bench, trial: Trial) -> None:
        done = self._refused(trial)
        if done is None:
            log_event(self.night, "trial_start", trial=trial.id)
            done = bench.evaluate(trial, self.archive.forward(trial))
        with self.changed:
            self.archive.finish(done)
            self.running = None
            self.changed.notify_all()
        log_event(self.night, "trial_end", trial=trial.id, outcome=done.outcome)

    def _refused(self, trial: Trial) -> Trial | None:
        """The end of a trial that is not begun: the service did not survive it, or somebody changed its source."""
        if (begun := self.begun[trial.id]) >= MAX_BEGINNINGS:
            message = f"the service ended {begun} times while this candidate ran; it is not tried again"
            return dataclasses.replace(trial, outcome=Outcome.CRASHED, message=message, finished_at=time.time())
        with contextlib.suppress(CandidateError, OSError, ValueError):
            if self.archive.forward(trial).id == trial.forward:
                return None
        message = "its source on disk is not what was submitted"
        return dataclasses.replace(trial, outcome=Outcome.REFUSED, message=message, finished_at=time.time())

    def _accept(self, listener: socket.socket, answer: Answer) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._converse, args=(connection, answer), daemon=True).start()

    def _converse(self, connection: socket.socket, answer: Answer) -> None:
        with connection, contextlib.suppress(PeerGone):
            while True:
                request = protocol.recv(connection).header
                try:
                    told = answer(request)
                except (ProtocolError, CandidateError, KeyError, TypeError, ValueError, OSError) as error:
                    told = {"type": "error", "message": f"{type(error).__name__}: {error}"}
                protocol.send(connection, told)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of an agent, or of anybody who may read."""
        kind = request.get("type")
        if kind == "submit":
            return self._submit(request)
        if kind == "trial":
            return {"type": "trial", "trial": self._trial(request["id"]).to_json()}
        if kind == "wait":
            return {"type": "trial", "trial": self._wait(request["id"], float(request["timeout_s"])).to_json()}
        if kind == "trials":
            with self.changed:
                return {"type": "trials", "trials": [trial.to_json() for trial in self.archive.trials.values()]}
        if kind == "incumbent":
            return {"type": "incumbent", "files": dict(self._ready().incumbent.files)}
        if kind == "queue":
            with self.changed:
                waiting = sum(trial.id != self.running for trial in self.archive.waiting)
                return {"type": "queue", "waiting": waiting, "running": self.running, "ready": self.bench is not None}
        if kind == "status":
            return {"type": "status", "night": str(self.night), "pid": os.getpid()}
        if kind == "source":
            return {"type": "source", "files": engine_source()}
        raise ProtocolError(f"the service does not know {kind!r}")

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of the flow or the operator: nothing that an agent can send gets here."""
        kind = request.get("type")
        if kind == "cancel":
            with self.changed:
                running = self.running
                return {
                    "type": "cancelled",
                    "count": self.archive.cancel_waiting(str(request["message"]), keep=running),
                }
        if kind == "stop":
            with self.changed:
                self.stopping = True
                self.changed.notify_all()
            return {"type": "stopping"}
        raise ProtocolError(f"the control socket does not know {kind!r}")

    def _submit(self, request: dict[str, Any]) -> dict[str, Any]:
        forward = Forward({str(name): str(text) for name, text in request["files"].items()})
        with self.changed:
            if self.stopping:
                raise ProtocolError("the service is stopping and takes no more candidates")
            trial = self.archive.submit(forward, str(request["tier"]), str(request["submitter"]))
            self.changed.notify_all()
        return {"type": "submitted", "id": trial.id}

    def _trial(self, name: str) -> Trial:
        with self.changed:
            if name not in self.archive.trials:
                raise ProtocolError(f"there is no trial {name!r}")
            return self.archive.trials[name]

    def _wait(self, name: str, timeout_s: float) -> Trial:
        """The trial when it is done, or as it is after min(timeout_s, WAIT_SLICE_S) seconds."""
        deadline = time.monotonic() + min(timeout_s, WAIT_SLICE_S)
        self._trial(name)
        with self.changed:
            trial = self.archive.trials[name]
            while not trial.done and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
                trial = self.archive.trials[name]
        return trial

    def _ready(self) -> Bench:
        with self.changed:
            while self.bench is None:
                self.changed.wait(1.0)
            return self.bench


def listen(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(64)
    return listener


def engine_source() -> dict[str, str]:
    """This package's engine as text, for agents to read."""
    root = Path(__file__).parent
    files = sorted(root.glob("*.py")) + sorted(root.glob("models/*/*.py"))
    return {f"engine/{path.relative_to(root).as_posix()}": path.read_text() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description="evaluate candidates for an endpoint")
    parser.add_argument("--config", type=Path, required=True, help="JSON, see service_config.ServiceConfig")
    args = parser.parse_args()
    config = ServiceConfig.read(args.config)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    write_atomic(config.night / "service.pid", str(os.getpid()))
    Service(config).run()


if __name__ == "__main__":
    main()
