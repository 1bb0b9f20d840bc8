"""The service: owns queue, clock, archive and truth of one night. Runs no candidate code and imports no torch.

`python -m tideforge.engine.service --config FILE`. Killed and started again it goes on where it was: finished trials are
in the archive, waiting ones are evaluated, those that were under way are evaluated again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tideforge.data.files import FULL, disk_full
from tideforge.engine import procfs, protocol, sockets
from tideforge.engine.archive import write_atomic
from tideforge.engine.claim import claim
from tideforge.engine.client import CONTROL, LOCK, SOCKET
from tideforge.engine.evaluate import Bench
from tideforge.engine.events import log_event
from tideforge.engine.forward import Forward
from tideforge.engine.lane import Lane
from tideforge.engine.outcome import Trial
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.setting import Setting
from tideforge.engine.trial_queue import TrialQueue
from tideforge.errors import PREFIX, CandidateError, PeerGone, ProtocolError, UserError

WAIT_SLICE_S = 10.0
ASK_S, MAX_REFUSED = 10.0, 1 << 20  # for a request that is refused: seconds, bytes

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Service:
    """Answers clients in threads; a lane for each device evaluates trials, all from one queue."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config, self.night = config, config.night
        self.setting = Setting.of(config)
        self.queue = TrialQueue(self.night, config.settings.state / "forwards", self.setting.id)
        self.incumbent: Forward | None = None  # once a lane is ready

    def run(self) -> None:
        """Until it is stopped. A lane that ends early is logged and the others go on; raises when the last one does."""
        self.setting.write(self.night)
        log_event(self.night, "service_start", waiting=len(self.queue.archive.waiting), setting=self.setting.id)
        state = self.config.settings.state
        with listen(state / SOCKET) as agents, listen(state / CONTROL) as control:
            for listener, answer in ((agents, self.answer), (control, self.control)):
                threading.Thread(target=self._accept, args=(listener, answer), daemon=True).start()
            lanes = [Lane(config, self.queue) for config in self.config.lanes]
            with ThreadPoolExecutor(len(lanes)) as threads:
                failures = [failure for failure in threads.map(self._run_lane, lanes) if failure is not None]
            if len(failures) == len(lanes):
                raise failures[-1]

    def _run_lane(self, lane: Lane) -> Exception | None:
        """What ended the lane before its time."""
        try:
            lane.run(self._lane_ready)
        except Exception as error:
            message = "".join(traceback.format_exception(error))
            log_event(self.night, "lane_died", lane=lane.config.lane, device=lane.device, message=message)
            self.queue.blame(lane.mine.values())
            return error
        return None

    def _lane_ready(self, bench: Bench) -> None:
        log_event(self.night, "lane_ready", device=bench.settings.device, lane=bench.config.lane)
        bench.incumbent.save(self.config.settings.state / "forwards")
        with self.queue.changed:
            first, self.incumbent = self.incumbent is None, bench.incumbent
            self.queue.changed.notify_all()
        if first:
            log_event(self.night, "service_ready", incumbent=bench.incumbent.id, knobs=bench.incumbent.knobs)

    def _accept(self, listener: socket.socket, answer: Answer) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._converse, args=(connection, answer), daemon=True).start()

    def _converse(self, connection: socket.socket, answer: Answer) -> None:
        with connection, contextlib.suppress(PeerGone):
            if procfs.descends(peer_of(connection), os.getpid()):
                with contextlib.suppress(ProtocolError):  # unread, it would find the connection closed and no answer
                    protocol.recv(connection, ASK_S, MAX_REFUSED)
                protocol.send(
                    connection, {"type": "error", "message": "the service takes nothing from its own workers"}
                )
                return
            while True:
                request = protocol.recv(connection).header
                try:
                    told = answer(request)
                except (ProtocolError, CandidateError, UserError, KeyError, TypeError, ValueError, OSError) as error:
                    told = self._problem(error)
                protocol.send(connection, told)

    def _problem(self, error: Exception) -> dict[str, Any]:
        """What is answered in place of an answer."""
        if isinstance(error, OSError) and error.errno in FULL:
            error = disk_full(self.night)
        if isinstance(error, UserError):
            return {"type": "user_error", "parts": [error.thing, error.problem, error.remedy]}
        return {"type": "error", "message": f"{type(error).__name__}: {error}"}

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
            with self.queue.changed:
                return {"type": "trials", "trials": [trial.to_json() for trial in self.queue.archive.present]}
        if kind == "incumbent":
            return {"type": "incumbent", "files": dict(self._ready().files)}
        if kind == "queue":
            with self.queue.changed:
                running, ready = self.queue.running, self.incumbent is not None
                waiting = sum(trial.id not in running for trial in self.queue.archive.waiting)
                return {
                    "type": "queue", "waiting": waiting, "running": next(iter(running), None), "ready": ready,
                    "stopping": self.queue.stopping,
                }  # fmt: skip
        if kind == "status":
            return {"type": "status", "night": str(self.night), "pid": os.getpid()}
        if kind == "source":
            return {"type": "source", "files": engine_source()}
        raise ProtocolError(f"the service does not know {kind!r}")

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of the flow or the operator: nothing that an agent can send gets here."""
        kind = request.get("type")
        if kind == "cancel":
            return {"type": "cancelled", "count": self.queue.cancel(str(request["message"]))}
        if kind == "stop":
            self.queue.stop()
            return {"type": "stopping"}
        raise ProtocolError(f"the control socket does not know {kind!r}")

    def _submit(self, request: dict[str, Any]) -> dict[str, Any]:
        forward = Forward({str(name): str(text) for name, text in request["files"].items()})
        trial = self.queue.submit(forward, str(request["tier"]), str(request["submitter"]))
        return {"type": "submitted", "id": trial.id}

    def _trial(self, name: str) -> Trial:
        with self.queue.changed:
            if name not in self.queue.archive.trials:
                raise ProtocolError(f"there is no trial {name!r}")
            return self.queue.archive.trials[name]

    def _wait(self, name: str, timeout_s: float) -> Trial:
        """The trial when it is done, or as it is after min(timeout_s, WAIT_SLICE_S) seconds."""
        self._trial(name)
        self.queue.until(lambda: self._trial(name).done, min(timeout_s, WAIT_SLICE_S))
        return self._trial(name)

    def _ready(self) -> Forward:
        while self.incumbent is None:
            self.queue.until(lambda: self.incumbent is not None, WAIT_SLICE_S)
        return self.incumbent


def peer_of(connection: socket.socket) -> int:
    """The process id of who connected (unix(7), SO_PEERCRED)."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


def listen(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return sockets.listen(path, 64)


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
    try:
        state = config.settings.state
        state.mkdir(parents=True, exist_ok=True)
        (state / LOCK).parent.mkdir(mode=0o700, exist_ok=True)
        claim(state / LOCK, state, "another service", "stop it first: tideforge engine stop")
        write_atomic(config.night / "service.pid", str(os.getpid()))
        Service(config).run()
    except UserError as error:
        print(f"{PREFIX}{error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
