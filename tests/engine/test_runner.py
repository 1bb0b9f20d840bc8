"""Padding: a step put into a larger shape gives its own rows the same tokens and pages, as a captured graph needs it."""

from __future__ import annotations

import pytest
import torch

from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Sampled, step_arrays, step_scalars
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.runner import GraphShape, StepTensors
from tideforge.engine.scheduler import Request


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
        tokens = self.inner.runner.compute(self.tensors[shape], shape.scalars, greedy=True)
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
    assert executor.runner.compute(tensors, shape.scalars, greedy=True).shape == (shape.rows,)
    for plane in (*memory.group.keys, *memory.group.values):
        assert plane[0].any() and not plane[1:].any()
