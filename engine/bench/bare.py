"""Bare replays: a forward's decode graph in a loop with nothing around it, in this process, at a request's contexts."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tideforge.data.workload import RequestShape
from tideforge.engine import protocol
from tideforge.engine.executor import Sampled, step_arrays, step_scalars
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab
from tideforge.engine.runner import GraphShape, Runner
from tideforge.engine.scheduler import Request, Step
from tideforge.engine.service_config import new_core
from tideforge.engine.worker import Worker


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
    kernels = lab.kernels(forward)  # this process is trusted with what is kept
    kernels.mkdir(parents=True, exist_ok=True)
    header, fds = lab.attachment(arena, kernels)
    header["memory_bytes"] = 0  # this process is not limited for it
    worker.attach(protocol.Message(header, {}, tuple(os.dup(fd) for fd in fds)))  # it closes what it was given
    folder = forward.save(lab.settings.state / "forwards").resolve()
    layers = [0, lab.config.num_hidden_layers]
    stage = {"folder": str(folder), "layers": layers, "kernels": str(kernels), "capture_rows": []}
    worker.stage(protocol.Message(stage, {}, ()))
    ours.close()
    theirs.close()
    assert worker.runner is not None
    return worker.runner
