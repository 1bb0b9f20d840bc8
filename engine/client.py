"""The engine's seam as seen from agents and tasks: submit, trial, incumbent, source, queue. One Unix socket, nothing else.

Ending the queue or the service is the flow's and the operator's: a socket of its own, which no sandbox shows to an agent.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from tideforge.engine import protocol, sockets
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Trial
from tideforge.errors import PeerGone, ProtocolError, UserError

CALL_TIMEOUT_S = 60.0
SOCKET, CONTROL = Path("engine.sock"), Path("control") / "control.sock"  # in the state folder
LOCK = CONTROL.parent / "service.lock"  # likewise: held by the service as long as it lives


@dataclasses.dataclass(frozen=True)
class QueueState:
    waiting: int
    running: str | None  # trial id
    ready: bool  # the incumbent runs and is tuned
    stopping: bool = False  # after what runs


class EngineClient:
    """Every call is a connection of its own and is repeated until the service answers, for at most `patience_s`: a service
    that is killed and started again is a delay to its clients, not an error. All calls are idempotent."""

    def __init__(self, path: Path, patience_s: float = 60.0) -> None:
        self.path, self.patience_s = Path(path), patience_s

    def submit(self, forward: Forward, tier: str = "slow", submitter: str = "") -> str:
        """Queues a forward; the trial's id. The same forward on the same tier is the same trial while the setting is the same."""
        request = {"type": "submit", "files": dict(forward.files), "tier": tier, "submitter": submitter}
        return str(self._call(request)["id"])

    def trial(self, name: str) -> Trial:
        return Trial.from_json(self._call({"type": "trial", "id": name})["trial"])

    def trials(self) -> list[Trial]:
        """Of the setting that the engine runs under."""
        return [Trial.from_json(text) for text in self._call({"type": "trials"})["trials"]]

    def wait(self, name: str, timeout_s: float) -> Trial:
        """The trial once it is done, or as it is after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            trial = Trial.from_json(self._call({"type": "wait", "id": name, "timeout_s": left})["trial"])
            if trial.done or time.monotonic() >= deadline:
                return trial

    def incumbent(self) -> Forward:
        """The incumbent with its tuned knobs; blocks until the service is ready."""
        return Forward(self._call({"type": "incumbent"}, timeout_s=300)["files"])

    def source(self) -> dict[str, str]:
        """The engine's own source by path, for reading."""
        return dict(self._call({"type": "source"})["files"])

    def queue(self) -> QueueState:
        answer = self._call({"type": "queue"})
        return QueueState(int(answer["waiting"]), answer["running"], bool(answer["ready"]), bool(answer["stopping"]))

    def status(self) -> dict[str, Any]:
        """night: the folder it works for; pid."""
        return self._call({"type": "status"})

    def _call(self, request: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        return call(self.path, request, self.patience_s, timeout_s)


class EngineControl:
    """Ends what runs. For the flow and the operator; its socket lies in a folder that only they can see."""

    def __init__(self, state: Path, patience_s: float = 60.0) -> None:
        self.path, self.patience_s = Path(state) / CONTROL, patience_s

    def cancel(self, message: str) -> int:
        """Ends every waiting trial (the running one goes on); how many."""
        return int(call(self.path, {"type": "cancel", "message": message}, self.patience_s)["count"])

    def stop(self) -> None:
        """The service ends after the running trial."""
        call(self.path, {"type": "stop"}, self.patience_s)


def call(path: Path, request: dict[str, Any], patience_s: float, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """The service's answer. Asked again while nobody answers, for at most `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with sockets.connect(path) as sock:
                return protocol.call(sock, request, timeout_s).header
        except (FileNotFoundError, ConnectionRefusedError, PeerGone) as error:
            if time.monotonic() >= deadline:
                raise UserError(
                    str(path),
                    "no engine answers there",
                    "a search starts one: `tideforge recompile` or `tideforge node search`",
                ) from error
            time.sleep(0.1)


__all__ = ["EngineClient", "EngineControl", "ProtocolError", "QueueState"]
