"""Steps with a temperature in captured graphs. Skipped, with the reason printed, where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab
from tideforge.engine.sampler import sample
from tideforge.engine.scheduler import Request, Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"
TEMPERATURES = (0.0, 0.7, 1.2, 0.0, 1.0)


def tokens(lab: Lab, worker, temperatures: tuple[float, ...]) -> list[tuple[str, int, int]]:
    core = EngineCore(lab.settings.limits, BlockPool(lab.settings.num_blocks, lab.settings.block_size, False))
    core.attach("f", worker)
    for i, temperature in enumerate(temperatures):
        core.add(
            Request(str(i), tuple(range(5 + i, 14 + 2 * i)), 40, Sampling(temperature, 0.95, 100 + i), forward="f")
        )
    events = []
    while core.has_work():
        events += core.step()
    return sorted((e.request_id, e.index, e.token) for e in events)


@pytest.mark.timeout(300)
def test_graph_and_plain_path_draw_the_same_tokens(tmp_path, end_keeper):
    """fp32, so that a padded batch's other reduction order moves no token."""
    end_keeper(tmp_path / "s")
    settings = Settings(
        state=tmp_path / "s", model=tiny_llama(tmp_path / "model"), num_blocks=128, device="cuda",
        limits=Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, decode_steps=16),
        capture_rows=(1, 5, 8), capture_tokens=(64,), capture_contexts=(64,),
    )  # fmt: skip
    one_step = dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, decode_steps=1))
    found = []
    for each, graphs in ((one_step, False), (settings, False), (settings, True)):
        with contextlib.closing(Lab(each)) as lab:
            worker = lab.spawn(Forward.load(LLAMA), lab.arena("sampling"))
            if graphs:
                tokens(lab, worker, TEMPERATURES)  # kernels are compiled now
                lab.capture(worker)
                assert len(tokens(lab, worker, (0.0,) * 5)) == 200
            found.append(tokens(lab, worker, TEMPERATURES))
            if graphs:
                assert tokens(lab, worker, TEMPERATURES) == found[-1]
                lab.capture(worker, sampling=True)  # as a server does, beforehand
                assert tokens(lab, worker, TEMPERATURES) == found[-1]
                alone = [token for token in tokens(lab, worker, TEMPERATURES[:2]) if token[0] == "1"]
                assert alone == [token for token in found[-1] if token[0] == "1"]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("vocabulary", [320, 128256])
def test_a_captured_sampler_draws_what_it_draws_on_the_cpu(rows: int, vocabulary: int):
    """Sorting takes other kernels for one row, for a few, and for many."""
    generator = torch.Generator().manual_seed(rows)
    inputs = (
        3 * torch.randn(rows, vocabulary, generator=generator),
        torch.linspace(0, 1.5, rows),
        torch.full((rows,), 0.9),
        torch.arange(rows),
        torch.arange(rows) + 7,
    )
    there = [tensor.cuda() for tensor in inputs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(*there)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = sample(*there)
        graph.replay()
        stream.synchronize()
        first = out.cpu()
        there[4] += 1
        graph.replay()
        stream.synchronize()
    assert first.tolist() == sample(*inputs).tolist()
    assert out.cpu().tolist() == sample(*inputs[:4], inputs[4] + 1).tolist()
