"""Decoding through the engine against bare replays of the same graph, in one run.

The engine's rate is what arrives in the authority's process over the Unix socket, scheduling and streaming included. The
bare rate is the same forward's graph replayed in a loop with nothing around it, at the same contexts.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tideforge.data.workload import RequestShape
from tideforge.engine import measure, protocol
from tideforge.engine.executor import Sampled, step_arrays, step_scalars
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab
from tideforge.engine.runner import GraphShape, Runner
from tideforge.engine.scheduler import Request, Step
from tideforge.engine.service_config import new_core
from tideforge.engine.worker import Worker


@dataclasses.dataclass(frozen=True)
class Rates:
    """Output tokens/s, medians over repeats."""

    users: int
    prompt: int
    output: int
    engine_tps: float  # over the whole block, prefill included
    engine_decode_tps: float  # from each user's first token on
    bare_tps: float  # graph replays alone

    @property
    def share(self) -> float:
        return self.engine_decode_tps / self.bare_tps


def rates(lab: Lab, forward: Forward, users: int, prompt: int, output: int, repeats: int = 5) -> Rates:
    """Raises CandidateError when the forward fails."""
    worker = lab.spawn(forward, lab.arena("bench"))
    try:
        side = measure.Side.of(forward.id, new_core(lab.settings), worker)
        shapes = [RequestShape(prompt, output)] * users
        blocks = []
        for index in range(repeats + 1):
            blocks.append(measure.run_block(side.core, forward.id, shapes, prompts(lab, shapes, index), users))
            if index == 0:  # kernels are compiled now
                lab.capture(worker)
    finally:
        lab.release(worker)
    decode = [users * (output - 1) / (_last(block) - _first(block)) for block in blocks[1:]]
    return Rates(
        users, prompt, output,
        statistics.median(block.output_tps for block in blocks[1:]), statistics.median(decode),
        bare_rate(lab, forward, users, prompt, output, repeats),
    )  # fmt: skip


def _first(block: measure.Block) -> float:
    return max(answer.times_s[0] for answer in block.answers)


def _last(block: measure.Block) -> float:
    return max(answer.times_s[-1] for answer in block.answers)


def prompts(lab: Lab, shapes: list[RequestShape], seed: int) -> list[tuple[int, ...]]:
    """Random token ids: real text has no say in how long a decode takes."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, lab.config.vocab_size, shape.prompt_tokens).tolist()) for shape in shapes]


def bare_rate(lab: Lab, forward: Forward, users: int, prompt: int, output: int, repeats: int) -> float:
    """Tokens/s of bare decode steps (graph replays on a GPU) in this process, from the context after the prompt to the last token."""
    shapes = [RequestShape(prompt, output)] * users
    step = first_decode(lab, forward, shapes, prompts(lab, shapes, 0))
    runner = in_process(lab, forward)
    replay, load = decode_loop(lab, runner, step, prompt + output)
    seconds = []
    for _ in range(repeats + 1):
        load()
        begin = time.perf_counter()
        replay(output - 1)
        seconds.append(time.perf_counter() - begin)
    return users * (output - 1) / statistics.median(seconds[1:])


def decode_loop(lab: Lab, runner: Runner, step: Step, longest: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    """`replay(n)` runs n decode steps and waits for the last; `load()` puts the first one's inputs in place."""
    if not lab.settings.capture_rows:
        scalars, arrays = step_scalars(step), step_arrays(step)

        def plainly(count: int) -> None:
            for _ in runner.run({**scalars, "num_steps": count}, arrays, lambda: False):
                pass

        return plainly, lambda: None
    rows = min(size for size in lab.settings.capture_rows if size >= len(step.seq_lens))
    context = min(size for size in lab.settings.capture_contexts if size >= longest)
    shape = GraphShape(False, rows, rows, context)
    runner.capture([shape])
    graph = runner.graphs[shape]

    def replay(count: int) -> None:
        for _ in range(count):
            graph.graph.replay()
        torch.cuda.synchronize()

    return replay, lambda: graph.tensors.load(step_arrays(step), False)


class Planned:
    """An executor that runs nothing and keeps the scheduler's last plan."""

    def execute(self, step: Step) -> list[Sampled]:
        self.step = step
        return [Sampled([5] * len(step.request_ids))]

    def halt(self) -> None:
        pass


def first_decode(lab: Lab, forward: Forward, shapes: list[RequestShape], texts: list[tuple[int, ...]]) -> Step:
    """The first step in which every request decodes."""
    core, planned = new_core(lab.settings), Planned()
    core.attach(forward.id, planned)
    for index, (shape, text) in enumerate(zip(shapes, texts, strict=True)):
        core.add(Request(str(index), text, shape.output_tokens, forward=forward.id))
    core.step()
    while planned.step.num_prefills:
        core.step()
    return planned.step


def in_process(lab: Lab, forward: Forward) -> Runner:
    """What runs the forward in a worker, in this process; attached to the keeper's memory like any other."""
    ours, theirs = socket.socketpair()
    worker, arena = Worker(theirs), lab.arena("bench")
    header, fds = lab.attachment(arena)
    header["memory_bytes"] = 0  # this process is not limited for it
    worker.attach(protocol.Message(header, {}, tuple(os.dup(fd) for fd in fds)))  # it closes what it was given
    folder = forward.save(lab.settings.state / "forwards").resolve()
    layers = [0, lab.config.num_hidden_layers]
    stage = {"folder": str(folder), "layers": layers, "kernels": str(lab.kernels(forward)), "capture_rows": []}
    worker.stage(protocol.Message(stage, {}, ()))
    ours.close()
    theirs.close()
    assert worker.runner is not None
    return worker.runner
