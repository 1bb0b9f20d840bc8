"""Padding: a step put into a larger shape gives its own rows the same tokens and pages, as a captured graph needs it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from tideforge.engine import graph
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Sampled, step_arrays, step_scalars
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.runner import GraphShape, StepTensors
from tideforge.engine.scheduler import Request, Sampling
from tideforge.errors import CandidateError


class Padded:
    """Runs every step in the smallest of some shapes, as a graph would, and plainly when none holds it."""

    def __init__(self, inner: LocalExecutor, shapes: list[GraphShape]) -> None:
        self.inner, self.shapes, self.used = inner, shapes, []
        size, device = inner.memory.group.block_size, torch.device("cpu")
        self.tensors = {shape: StepTensors.blank(shape, size, device) for shape in shapes}

    def execute(self, step):
        scalars, arrays = step_scalars(step), step_arrays(step)
        fitting = [shape for shape in self.shapes if shape.holds(scalars, arrays)]
        if not fitting:
            return self.inner.execute(step)
        shape = min(fitting)
        self.used.append(shape)
        self.tensors[shape].load(arrays, shape.prefill)
        tokens = self.inner.runner.compute(self.tensors[shape], shape.scalars)
        return [Sampled(tokens[: len(arrays["logits_indices"])].tolist())]

    def halt(self) -> None:
        pass


SHAPES = [
    GraphShape(False, 2, 2, 32),
    GraphShape(False, 6, 6, 64),
    GraphShape(True, 8, 4, 32),
    GraphShape(True, 32, 6, 64),
]


def test_padded_steps_give_the_same_tokens_and_pages(tiny, plain, tmp_path) -> None:
    settings = Settings(state=tmp_path, model=tiny, num_blocks=64, limits=Limits(6, 32, 128))
    out, pages = [], []
    for shapes in ([], SHAPES):
        memory = LocalMemory(settings)
        executor = Padded(LocalExecutor(plain, memory), shapes)
        core = EngineCore(settings.limits, BlockPool(64, settings.block_size))
        core.attach("f", executor)
        for i, length in enumerate((3, 40, 7, 1, 20)):
            core.add(Request(str(i), tuple(range(4 + i, 4 + i + length)), 9 + i, forward="f"))
        events = []
        while core.has_work():
            events += core.step()
            if len(core.scheduler.requests()) == 1 and "late" not in {e.request_id for e in events}:
                core.add(Request("late", (9, 8, 7), 3, forward="f"))
        out.append(sorted((e.request_id, e.index, e.token) for e in events))
        pages.append(torch.stack([*memory.group.keys, *memory.group.values])[:, 1:])  # but the dummy page
    assert out[0] == out[1]
    assert torch.equal(pages[0] == 0, pages[1] == 0)
    assert torch.allclose(pages[0], pages[1], atol=1e-5)
    assert set(executor.used) == set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_blank_step_touches_the_dummy_page_only(tiny, plain, tmp_path, shape) -> None:
    memory = LocalMemory(Settings(state=tmp_path, model=tiny, num_blocks=16))
    executor = LocalExecutor(plain, memory)
    tensors = StepTensors.blank(shape, memory.group.block_size, torch.device("cpu"))
    assert int(tensors.query_start_loc[-1]) == shape.tokens
    assert executor.runner.compute(tensors, shape.scalars).shape == (shape.rows,)
    for plane in (*memory.group.keys, *memory.group.values):
        assert plane[0].any() and not plane[1:].any()


def mixed(executor: LocalExecutor, settings: Settings, decode_steps: int) -> list[tuple[str, int, int]]:
    """Tokens of five requests, two of them greedy; the longest ends where the largest graph's context does."""
    core = EngineCore(
        dataclasses.replace(settings.limits, decode_steps=decode_steps), BlockPool(64, settings.block_size)
    )
    core.attach("f", executor)
    for i, (length, temperature) in enumerate(((3, 0.0), (40, 0.8), (7, 1.3), (1, 0.0), (20, 0.5))):
        prompt = tuple(range(4 + i, 4 + i + length))
        core.add(Request(str(i), prompt, 65 - length, Sampling(temperature, 0.9, seed=i), forward="f"))
    events = []
    while core.has_work():
        events += core.step()
    return sorted((e.request_id, e.index, e.token) for e in events)


@pytest.mark.parametrize("decode_steps", [1, 7])
def test_graphs_draw_the_tokens_of_the_plain_path(tiny, plain, tmp_path, decode_steps) -> None:
    settings = Settings(state=tmp_path, model=tiny, num_blocks=64, limits=Limits(6, 32, 128))
    expected = mixed(LocalExecutor(plain, LocalMemory(settings)), settings, 1)
    executor = LocalExecutor(plain, LocalMemory(settings))
    executor.runner.capture([GraphShape(False, 6, 6, 64), GraphShape(True, 32, 6, 64)])
    executor.runner._plainly = None  # no step may take it
    assert mixed(executor, settings, decode_steps) == expected
    assert all(graph.sampling is not None for graph in executor.runner.graphs.values())


@pytest.mark.parametrize(
    ("under_capture", "told"), [("forward_error", "capture_error"), ("out_of_memory", "out_of_memory")]
)
def test_what_fails_under_a_capture_alone_is_told_so(monkeypatch, under_capture, told) -> None:
    for name in ("synchronize", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    errors = iter([None, CandidateError(under_capture, "why")])

    def step() -> None:
        if (error := next(errors)) is not None:
            raise error

    with pytest.raises(CandidateError, match="why") as caught:
        graph.record(step, torch.device("cuda"), None)
    assert caught.value.outcome == told


def test_greedy_steps_make_no_graph_for_sampling(tiny, plain, tmp_path) -> None:
    settings = Settings(state=tmp_path, model=tiny, num_blocks=64, limits=Limits(6, 32, 128))
    executor = LocalExecutor(plain, LocalMemory(settings))
    executor.runner.capture(SHAPES)
    core = EngineCore(settings.limits, BlockPool(64, settings.block_size))
    core.attach("f", executor)
    core.add(Request("r", (5, 6, 7), 8, forward="f"))
    while core.has_work():
        assert core.step()
    assert [graph.sampling for graph in executor.runner.graphs.values()] == [None] * len(SHAPES)
    executor.runner.capture(SHAPES, sampling=True)
    assert None not in [graph.sampling for graph in executor.runner.graphs.values()]


def test_the_smallest_graph_that_holds_a_step_is_taken(tiny, plain, tmp_path) -> None:
    settings = Settings(state=tmp_path, model=tiny, num_blocks=64, limits=Limits(6, 32, 128))
    runner = LocalExecutor(plain, LocalMemory(settings)).runner
    runner.capture(SHAPES)

    def chosen(prefills: int, tokens: int, rows: int, context: int):
        arrays = {"input_ids": [0] * tokens, "seq_lens": [1] * rows}
        graph = runner._graph_for({"num_prefills": prefills, "max_seq_len": context}, arrays)
        return graph and graph.shape

    assert chosen(0, 2, 2, 32) == SHAPES[0]
    assert chosen(0, 2, 2, 64) == chosen(0, 3, 3, 16) == SHAPES[1]
    assert chosen(1, 5, 4, 32) == SHAPES[2]
    assert chosen(1, 9, 1, 16) == SHAPES[3]
    assert chosen(0, 7, 7, 16) is None and chosen(1, 33, 1, 64) is None and chosen(0, 1, 1, 128) is None


def test_a_worker_captures_and_draws_the_same(lab, plain) -> None:
    """On the CPU a graph is its step run again; everything around it is as on a GPU."""
    settings = dataclasses.replace(lab.settings, limits=Limits(6, 32, 128))
    worker = lab.spawn(plain, lab.arena("graphs"))
    expected = mixed(worker, settings, 1)
    worker.capture([(False, 6, 6, 64), (True, 32, 6, 64)], 60, sampling=True)
    assert mixed(worker, settings, 7) == expected
    lab.release(worker)
