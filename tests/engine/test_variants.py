"""Every honest variant gives the raw forward's answers, in each family that the forward is for; kernels in the interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tideforge.data.workload import RequestShape
from tideforge.engine import doubles, measure
from tideforge.engine.bench.variants import ATTENTION, EXPERTS, honest
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.screen import screen

MODELS = Path(doubles.__file__).parent / "models"
FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "moe": "moe", "qwen2_moe": "moe", "qwen3_moe": "moe"}
SHAPES = [
    RequestShape(9, 6),
    RequestShape(21, 4),
    RequestShape(140, 3),
]  # the last one's context takes two splits of 128
PROMPTS = measure.draw_prompts(SHAPES, [(7 * i + i // 11) % 250 for i in range(600)], secret=1)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory) -> tuple[LocalMemory, Forward]:
    torch.set_num_threads(1)
    folder, state = (tmp_path_factory.mktemp(request.param) for _ in range(2))
    model = doubles.DOUBLES[request.param](folder, seed=4, layers=2)
    memory = LocalMemory(Settings(state, model, limits=Limits(4, 64, 256), num_blocks=64))
    return memory, Forward.load(MODELS / FAMILIES[request.param])


def replay(memory: LocalMemory, executor: LocalExecutor) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """Every answer's tokens, and the last step's logits."""
    core = EngineCore(memory.settings.limits, BlockPool(64, 16, prefix_cache=False))
    side = measure.Side.of("f", core, executor)
    block = measure.run_block(side.core, "f", SHAPES, PROMPTS, users=3)
    return [answer.tokens for answer in block.answers], memory.logits[:1].clone()


def with_kernels(executor: LocalExecutor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LocalExecutor:
    """As on a GPU: each layer takes the forward's own kernels."""
    monkeypatch.syspath_prepend(str(folder))
    for name in ("paged_attention", "experts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from paged_attention import paged_attention

    forward = executor.runner.forward
    type(forward).__call__.__globals__["sequences"] = lambda batch, block_size: batch
    for layer in forward.layers:
        layer.attention = paged_attention
        if getattr(layer, "sparse", False):
            layer.use_kernels()
    return executor


@pytest.mark.timeout(240)
def test_every_variant_answers_as_the_raw_forward_does(family) -> None:
    memory, plain = family
    tokens, logits = replay(memory, LocalExecutor(plain, memory))
    for name, forward in honest(plain):
        got, last = replay(memory, LocalExecutor(forward, memory))
        assert got == tokens, name
        torch.testing.assert_close(last, logits, atol=2e-3, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_kernels_of_another_cut_answer_as_the_plain_forward_does(kind, tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    model = doubles.DOUBLES[kind](tmp_path / "model", seed=4, layers=1)
    memory = LocalMemory(Settings(tmp_path, model, limits=Limits(4, 64, 256), num_blocks=64))
    plain = Forward.load(MODELS / kind)
    tokens, logits = replay(memory, LocalExecutor(plain, memory))
    cut = [(name, f) for name, f in honest(plain) if f.files[ENTRY] == plain.files[ENTRY]]
    assert {name.split("-")[0] for name, _ in cut} == ({"attention", "experts"} if kind == "moe" else {"attention"})
    for name, forward in cut:
        executor = with_kernels(
            LocalExecutor(forward, memory), memory.settings.state / "forwards" / forward.id, monkeypatch
        )
        got, last = replay(memory, executor)
        assert got == tokens, name
        torch.testing.assert_close(last, logits, atol=2e-3, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_there_are_enough_of_them_and_each_is_another_source(kind) -> None:
    plain = Forward.load(MODELS / kind)
    made = honest(plain)
    assert len({forward.id for _, forward in made} | {plain.id}) == len(made) + 1
    assert len({name for name, _ in made}) == len(made) >= 30
    for _, forward in made:
        screen(forward)
        assert forward.knobs == plain.knobs and set(forward.files) == set(plain.files)


def test_a_forward_without_a_place_for_a_rewrite_has_no_such_variant() -> None:
    bare = Forward({ENTRY: "def build(ctx):\n    return None\n"})
    assert honest(bare) == []
    normed = bare.with_file(ENTRY, "def rms_norm(x, weight, eps):\n    return x\n\n\n" + bare.files[ENTRY])
    names = [name for name, _ in honest(normed)]
    assert names == ["norm-fused", "norm-by-hand", "norm-in-fp32", "norm-by-length"]
    assert all(name not in normed.files for name in (ATTENTION, EXPERTS))
