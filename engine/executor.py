"""What executes a step: a worker process (RemoteExecutor), or a forward in this process (LocalExecutor, the oracle)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
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
ANSWERS = {"attach": "ready", "stage": "staged", "capture": "captured", "step": "tokens"}
# What a worker may say of its own forward; everything else is observed by the authority.
CLAIMABLE = frozenset(
    {"syntax_error", "import_error", "build_error", "forward_error", "capture_error", "out_of_memory"}
)
SCALARS = ("num_decodes", "num_prefills", "max_query_len", "max_seq_len", "num_steps")


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A token for each of a step's N logits rows, and whether no more come of this step."""

    tokens: Sequence[int]
    last: bool = True


class Executor(Protocol):
    """Runs a step up to `step.num_steps` times; each run's tokens come as soon as they are there."""

    def execute(self, step: Step) -> Iterable[Sampled]: ...

    def halt(self) -> None:
        """Ends the step that runs soon; its `execute` says when. Asked only of steps with num_steps > 1."""


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

    def stage(
        self, folder: Path, layers: range, timeout_s: float, kernels: Path, capture_rows: Sequence[int] = ()
    ) -> float:
        """Imports and builds the forward in `folder`, which compiles into `kernels`; seconds that the worker took."""
        header: dict[str, object] = {
            "type": "stage", "folder": str(folder), "layers": [layers.start, layers.stop], "kernels": str(kernels),
            "capture_rows": list(capture_rows),
        }  # fmt: skip
        return float(self._ask(header, {}, timeout_s).header.get("seconds", 0.0))

    def capture(self, shapes: Sequence[tuple[bool, int, int, int]], timeout_s: float) -> float:
        """Captures a graph for each shape (runner.GraphShape); seconds that the worker took."""
        header: dict[str, object] = {"type": "capture", "shapes": [list(shape) for shape in shapes]}
        return float(self._ask(header, {}, timeout_s).header.get("seconds", 0.0))

    def execute(self, step: Step) -> Iterator[Sampled]:
        answer = self._ask({"type": "step", **step_scalars(step)}, step_arrays(step), self.step_timeout_s)
        for left in reversed(range(step.num_steps)):
            sampled = _sampled(answer, step, left == 0)
            if sampled.last:
                yield sampled
                return
            try:
                yield sampled
            except GeneratorExit:  # nobody wants the rest, and the next step must not read it
                with contextlib.suppress(CandidateError):
                    self._skip(step, sampled, left)
                raise
            answer = self._receive("step", self.step_timeout_s)

    def _skip(self, step: Step, sampled: Sampled, left: int) -> None:
        self.halt()
        while not sampled.last:
            left -= 1
            sampled = _sampled(self._receive("step", self.step_timeout_s), step, left == 0)

    def halt(self) -> None:
        with contextlib.suppress(PeerGone):  # its death is seen where its answer is awaited
            protocol.send(self.sock, {"type": "halt"})

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


def _sampled(answer: protocol.Message, step: Step, last: bool) -> Sampled:
    tokens = answer.arrays.get("tokens")
    if tokens is None or tokens.shape != step.logits_indices.shape:
        raise CandidateError("forward_error", "the worker answered with a wrong number of tokens")
    return Sampled(tokens.tolist(), last or not answer.header.get("more"))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the session that the process leads, then reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
