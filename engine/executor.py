"""What executes a step: a worker process (RemoteExecutor), or a forward in this process (LocalExecutor, the oracle)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tideforge.engine import protocol
from tideforge.errors import CandidateError, PeerGone, PeerTimeout, ProtocolError

if TYPE_CHECKING:
    from tideforge.engine.memory import Arena
    from tideforge.engine.scheduler import Step

ARRAYS = (
    "input_ids", "positions", "slot_mapping", "block_tables", "seq_lens", "query_start_loc", "logits_indices",
    "temperatures", "top_ps", "seeds", "sample_positions",
)  # fmt: skip
ANSWERS = {"attach": "ready", "stage": "staged", "step": "tokens"}
# What a worker may say of its own forward; everything else is observed by the authority.
CLAIMABLE = frozenset({"syntax_error", "import_error", "build_error", "forward_error", "out_of_memory"})
SCALARS = ("num_decodes", "num_prefills", "max_query_len", "max_seq_len")


class Executor(Protocol):
    """Runs one step and returns a token for each of its N logits rows."""

    def execute(self, step: Step) -> list[int]: ...


def step_arrays(step: Step) -> dict[str, np.ndarray]:
    return {name: getattr(step, name) for name in ARRAYS}


def step_scalars(step: Step) -> dict[str, int]:
    return {name: int(getattr(step, name)) for name in SCALARS}


class RemoteExecutor:
    """The authority's end of a worker. Every failure is raised as CandidateError with the outcome that was observed.

    `step_timeout_s` bounds one step; the worker is killed when it runs over.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, arena: Arena, step_timeout_s: float = 60
    ) -> None:
        self.process, self.sock, self.arena, self.step_timeout_s = process, sock, arena, step_timeout_s
        self.ready = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def expect_ready(self, timeout_s: float) -> None:
        """Waits for the answer to the attach message that started this worker."""
        self._receive("attach", timeout_s)
        self.ready = True

    def stage(self, folder: Path, layers: range, timeout_s: float) -> float:
        """Imports and builds the forward in `folder`; seconds that the worker took."""
        answer = self._ask(
            {"type": "stage", "folder": str(folder), "layers": [layers.start, layers.stop]}, {}, timeout_s
        )
        return float(answer.header.get("seconds", 0.0))

    def execute(self, step: Step) -> list[int]:
        answer = self._ask({"type": "step", **step_scalars(step)}, step_arrays(step), self.step_timeout_s)
        tokens = answer.arrays.get("tokens")
        if tokens is None or tokens.shape != step.logits_indices.shape:
            raise CandidateError("forward_error", "the worker answered with a wrong number of tokens")
        return [int(token) for token in tokens]

    def _ask(self, header: dict[str, object], arrays: dict[str, np.ndarray], timeout_s: float) -> protocol.Message:
        try:
            protocol.send(self.sock, header, arrays)
        except PeerGone:
            raise self._death() from None
        return self._receive(str(header["type"]), timeout_s)

    def _receive(self, what: str, timeout_s: float) -> protocol.Message:
        try:
            answer = protocol.recv(self.sock, timeout_s)
        except PeerTimeout:
            self.kill()
            raise CandidateError("hung", f"no answer to {what} within {timeout_s:g} s; killed") from None
        except PeerGone:
            raise self._death() from None
        except ProtocolError as error:  # a candidate can write to its worker's socket
            self.kill()
            raise CandidateError(
                "forward_error", f"the worker's answer to {what} is malformed ({error}); killed"
            ) from None
        if answer.type == "failed":
            outcome = str(answer.header.get("outcome"))
            if outcome not in CLAIMABLE:
                outcome = "forward_error"
            raise CandidateError(outcome, str(answer.header.get("message", ""))[:500])
        if answer.type != ANSWERS[what]:
            self.kill()
            raise CandidateError("forward_error", f"the worker answered {what} with {answer.type!r:.40}; killed")
        return answer

    def _death(self) -> CandidateError:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            return CandidateError("exited", "the worker closed its socket without ending; killed")
        if code < 0:
            return CandidateError("crashed", f"the worker died of {signal.Signals(-code).name}")
        return CandidateError("exited", f"the worker ended by itself with code {code}")

    def kill(self) -> None:
        """Ends the worker and whatever it left in its process group."""
        kill_group(self.process)

    def close(self) -> None:
        self.kill()
        self.sock.close()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the session that the process leads, then reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
