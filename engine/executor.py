"""What executes a step: a worker process (RemoteExecutor), or a forward in this process (LocalExecutor, the oracle)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tideforge.engine import protocol
from tideforge.engine.ward import End, Ward
from tideforge.errors import CandidateError, PeerGone, PeerTimeout, ProtocolError

if TYPE_CHECKING:
    from tideforge.engine.memory import Arena
    from tideforge.engine.scheduler import Step

ARRAYS = (
    "input_ids", "positions", "slot_mapping", "block_tables", "seq_lens", "query_start_loc", "logits_indices",
    "temperatures", "top_ps", "seeds", "sample_positions",
)  # fmt: skip
ANSWERS = {"attach": "ready", "stage": "staged", "dry": "dried", "capture": "captured", "step": "tokens"}
# What a worker may say of its own forward, by what it was asked for; everything else is observed by the authority. The first
# stands for any other word.
CLAIMABLE = {
    "attach": ("exited",),
    "stage": ("build_error", "syntax_error", "import_error", "out_of_memory", "too_much_output"),
    "dry": ("forward_error",),
    "capture": ("capture_error", "forward_error", "wrong_shape", "out_of_memory", "too_much_output"),
    "step": ("forward_error", "wrong_shape", "out_of_memory", "too_much_output"),
}
MAX_ANSWER = 1 << 20  # bytes: tokens and a message
SOCKET_GRACE_S = 2.0  # from the end of a worker's socket to its own
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

    def __init__(self, ward: Ward, sock: socket.socket, arena: Arena, step_timeout_s: float = 60) -> None:
        self.ward, self.sock, self.arena, self.step_timeout_s = ward, sock, arena, step_timeout_s
        self.ready = False
        self.attach_s: dict[str, float] = {}  # what each part of the attachment took, as the worker says: a hint
        self.resident: deque[int] = deque(maxlen=4096)  # bytes of the worker's own memory after each answer to a step

    @property
    def pid(self) -> int:
        return self.ward.pid

    @property
    def alive(self) -> bool:
        return self.ward.alive

    def expect_ready(self, timeout_s: float) -> None:
        """Waits for the answer to the attach message that started this worker."""
        said = self._receive("attach", timeout_s).header.get("seconds")
        if isinstance(said, dict):
            self.attach_s = {name: float(value) for name, value in said.items() if isinstance(value, int | float)}
        self.ready = True

    def stage(
        self, folder: Path, layers: range, timeout_s: float, kernels: Path, capture_rows: Sequence[int] = ()
    ) -> float:
        """Imports and builds the forward in `folder`, which compiles into `kernels`; seconds that the worker took."""
        header: dict[str, object] = {
            "type": "stage", "folder": str(folder), "layers": [layers.start, layers.stop], "kernels": str(kernels),
            "capture_rows": list(capture_rows),
        }  # fmt: skip
        return seconds(self._ask(header, {}, timeout_s))

    def dry(self, shapes: Sequence[tuple[bool, int, int, int]], timeout_s: float) -> bool:
        """Has the worker compile what the staged forward launches at these shapes (runner.GraphShape), without running it.

        False: the worker says that it could not, and is no longer as good as a fresh one.
        """
        header: dict[str, object] = {"type": "dry", "shapes": [list(shape) for shape in shapes]}
        return self._ask(header, {}, timeout_s).header.get("whole") is True

    def select(self, depth: int) -> None:
        """From now on steps and captures are of the forward as staged with so many layers. Nothing answers this."""
        with contextlib.suppress(PeerGone):  # its death is seen where its answer is awaited
            protocol.send(self.sock, {"type": "select", "depth": depth})

    def capture(self, shapes: Sequence[tuple[bool, int, int, int]], timeout_s: float, sampling: bool = False) -> float:
        """Captures a graph for each shape (runner.GraphShape), with `sampling` two; seconds that the worker took."""
        header: dict[str, object] = {
            "type": "capture",
            "shapes": [list(shape) for shape in shapes],
            "sampling": sampling,
        }
        return seconds(self._ask(header, {}, timeout_s))

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
        what = str(header["type"])
        try:
            protocol.send(self.sock, header, arrays, timeout_s=timeout_s)
        except PeerGone:
            raise self._death() from None
        except PeerTimeout:
            raise self._silence(what, timeout_s) from None
        return self._receive(what, timeout_s)

    def _receive(self, what: str, timeout_s: float) -> protocol.Message:
        try:
            answer = protocol.recv(self.sock, timeout_s, MAX_ANSWER)
        except PeerTimeout:
            raise self._silence(what, timeout_s) from None
        except PeerGone:
            raise self._death() from None
        except ProtocolError as error:  # a candidate can write to its worker's socket
            raise self._malformed(what, str(error)) from None
        for fd in answer.fds:
            os.close(fd)
        if answer.type == "failed":
            raise self._claim(what, answer.header)
        if answer.type != ANSWERS[what]:
            raise self._malformed(what, f"{answer.type!r:.40}")
        if what == "step":
            self.resident.append(self.ward.anonymous_bytes())
        return answer

    def _silence(self, what: str, timeout_s: float) -> CandidateError:
        end = self.kill()
        if end.verdict:
            return end.error()
        return CandidateError("hung", f"no answer to {what} within {timeout_s:.3g} s; killed")

    def _claim(self, what: str, header: Mapping[str, object]) -> CandidateError:
        outcome = str(header.get("outcome"))
        known = CLAIMABLE[what]
        return CandidateError(outcome if outcome in known else known[0], printable(str(header.get("message", ""))))

    def _malformed(self, what: str, found: str) -> CandidateError:
        self.kill()
        return CandidateError(
            "forward_error", printable(f"the worker's answer to {what} is malformed ({found}); killed")
        )

    def _death(self) -> CandidateError:
        """Why the socket has ended, which a worker can also do alone."""
        end = self.ward.end(SOCKET_GRACE_S)
        if not end.by_itself and not end.verdict and end.code is not None:
            return CandidateError("exited", "the worker closed its socket without ending; killed")
        return end.error()

    def kill(self) -> End:
        """Ends the worker and whatever it started."""
        return self.ward.end()

    def close(self) -> None:
        self.kill()
        self.sock.close()


def _sampled(answer: protocol.Message, step: Step, last: bool) -> Sampled:
    tokens = answer.arrays.get("tokens")
    if tokens is None or tokens.dtype.kind != "i" or tokens.shape != step.logits_indices.shape:
        raise CandidateError("forward_error", "the worker answered with a wrong number of tokens")
    return Sampled(tokens.tolist(), last or not answer.header.get("more"))


def printable(text: str) -> str:
    """A candidate's words on one line without what a terminal or a file could not take."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:500])


def seconds(answer: protocol.Message) -> float:
    """What a worker says it took: a hint."""
    said = answer.header.get("seconds")
    return float(said) if isinstance(said, int | float) else 0.0
