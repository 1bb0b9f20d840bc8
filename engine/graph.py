"""CUDA graphs of steps, and steps that are launched before the tokens of the one before them are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tideforge.engine.faults import observe
from tideforge.engine.step_tensors import GraphShape, StepTensors
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from tideforge.engine.runner import Runner

AHEAD = 2  # decode steps that are launched before the first one's tokens are here
Tokens = tuple[np.ndarray, bool]  # [N], and whether more come of this step


class Recorded(Protocol):
    def replay(self) -> None: ...


class Rerun:
    """What a graph stands for, run again: where there is no GPU, and the oracle of graphs."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


def record(step: Callable[[], None], device: torch.device, pool: Any) -> Recorded:
    """Captures what `step` launches; it must not ask the host."""
    step()  # outside the capture: kernels compile, cuBLAS gets its workspace
    if device.type == "cpu":
        return Rerun(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            step()
    except CandidateError as error:  # the same step did not fail before
        raise error if error.outcome != "forward_error" else CandidateError("capture_error", error.message) from error
    return graph


class Outbox:
    """Tokens on their way to the host, of the last AHEAD steps: `post` does not wait, `take` waits for the oldest."""

    def __init__(self, rows: int, device: torch.device) -> None:
        on_gpu = device.type != "cpu"
        self.ahead = AHEAD if on_gpu else 1
        self.host = torch.zeros((self.ahead, rows), dtype=torch.int64, pin_memory=on_gpu)
        self.events = [torch.cuda.Event() for _ in range(self.ahead)] if on_gpu else []
        self.posted = self.taken = 0

    @property
    def under_way(self) -> int:
        return self.posted - self.taken

    def post(self, tokens: Tensor) -> None:
        slot = self.posted % self.ahead
        self.host[slot].copy_(tokens, non_blocking=True)
        if self.events:
            self.events[slot].record()
        self.posted += 1

    def take(self, rows: int) -> np.ndarray:
        slot = self.taken % self.ahead
        if self.events:
            self.events[slot].synchronize()
        self.taken += 1
        return self.host[slot, :rows].numpy().copy()


def run_ahead(
    launch: Callable[[], Tensor], outbox: Outbox, rows: int, num_steps: int, halted: Callable[[], bool]
) -> Iterator[Tokens]:
    """Launches a step `num_steps` times or until `halted` says so. While the host looks at one's tokens, the next one runs."""
    left, outbox.taken = num_steps, outbox.posted  # what a run that was given up left behind is nobody's
    while left > 0 or outbox.under_way:
        while left > 0 and outbox.under_way < outbox.ahead:
            outbox.post(observe(launch, "forward_error"))
            left -= 1
        tokens = observe(partial(outbox.take, rows), "forward_error")
        left = 0 if left > 0 and halted() else left
        yield tokens, left > 0 or outbox.under_way > 0


class Graph:
    """A step of some shape, captured: forward, largest logit, and of a decode the inputs of the next one.

    A step with a temperature replays a second graph behind it, which draws from the logits that the first one left. It is
    captured when the first such step comes, if not before: trials, which are greedy, never pay for it.
    """

    def __init__(self, runner: Runner, shape: GraphShape, pool: Any) -> None:
        self.runner, self.shape, self.pool = runner, shape, pool
        self.tensors = StepTensors.blank(shape, runner.block_size, runner.device)
        self.tokens = torch.zeros(shape.rows, dtype=torch.int64, device=runner.device)
        self.outbox = Outbox(shape.rows, runner.device)
        self.graph = observe(lambda: record(self._step, runner.device, pool), "capture_error")
        self.sampling: Recorded | None = None

    def _step(self) -> None:
        self.tokens.copy_(self.runner.compute(self.tensors, self.shape.scalars))
        if not self.shape.prefill:
            self.tensors.advance(self.tokens, self.runner.block_size)

    def _sample(self) -> None:
        self.tokens.copy_(self.runner.sample(self.tensors))
        if not self.shape.prefill:
            self.tensors.feed(self.tokens)

    def capture_sampling(self) -> Recorded:
        """Once; raises CandidateError, out of memory for instance."""
        if self.sampling is None:
            self.sampling = observe(lambda: record(self._sample, self.runner.device, self.pool), "forward_error")
        return self.sampling

    def replay(self, arrays: Mapping[str, np.ndarray], num_steps: int, halted: Callable[[], bool]) -> Iterator[Tokens]:
        parts = [self.graph]
        if arrays["temperatures"].any():
            parts.append(
                self.capture_sampling()
            )  # before the step is loaded: what is captured runs once on what is there
        self.tensors.load(arrays, self.shape.prefill)

        def launch() -> Tensor:
            for part in parts:
                part.replay()
            return self.tokens

        return run_ahead(launch, self.outbox, len(arrays["logits_indices"]), num_steps, halted)
