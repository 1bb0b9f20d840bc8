"""Random weights in device memory. Skipped where there is no GPU. Run with -s to see what took how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import device as device_memory
from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.evaluate import Bench
from tideforge.engine.lab import Lab
from tideforge.engine.model_config import model_for
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.random_weights import RandomWeights, describe, write
from tideforge.engine.reference import Reference
from tideforge.engine.reference_model import ReferenceModel
from tideforge.engine.service_config import ServiceConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
DEVICE = torch.device("cuda:0")
SHAPE, LAYERS = "qwen3-30b-a3b", 4  # 7.5 GB


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return describe(tmp_path_factory.mktemp("model"), SHAPE, 3, LAYERS)


@pytest.fixture(scope="module")
def lab(model, tmp_path_factory, end_keeper) -> Iterator[Lab]:
    state = tmp_path_factory.mktemp("s")
    end_keeper(state)
    with contextlib.closing(Lab(Settings(state, model, dtype="bfloat16", device="cuda"))) as lab:
        begin = time.perf_counter()
        assert len(lab.weights_sha256) == 64
        print(f"keeper: {lab.weights_bytes / 1e9:.1f} GB drawn {time.perf_counter() - begin:.2f} s after its start")
        yield lab


def held(lab: Lab, writable: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The keeper's pages, and its weights by name."""
    header = lab._ask_weights().header
    pages = device_memory.attach(lab._ask_weights().fds[0], header["bytes"], DEVICE, writable)
    views = {name: pages[at : at + size].view(torch.bfloat16) for name, _, at, size in header["entries"]}
    return pages, {name: views[name].reshape(shape) for name, shape, _, _ in header["entries"]}


def test_the_keeper_holds_what_this_process_draws(lab, model) -> None:
    weights, drawn = held(lab)[1], RandomWeights.load(model)
    assert list(weights) == drawn.names
    for name in [*drawn.names[::97], "lm_head.weight"]:
        assert torch.equal(weights[name], drawn.tensor(name, DEVICE)), name
    wide = weights[f"model.layers.{LAYERS - 1}.mlp.experts.127.down_proj.weight"]
    assert abs(wide.float().std().item() * 768**0.5 - 1) < 0.005
    bits = wide.flatten().view(torch.int16).int()
    ones = [((bits >> place) & 1).float().mean().item() for place in (*range(7), 15)]
    assert all(0.4 < share < 0.6 for share in ones) and len(bits.unique()) > 3000


def test_a_store_is_seen_and_undone(lab, model) -> None:
    pages, weights = held(lab, writable=True)
    drawn = RandomWeights.load(model)
    assert lab.weights_intact()
    for at in (1, len(pages) // 2 + 5, len(pages) - 1):
        pages[at] ^= 4
        torch.cuda.synchronize()
        assert not lab.weights_intact()
        begin = time.perf_counter()
        assert lab.weights_intact()
        print(f"checksum of {len(pages) / 1e9:.1f} GB: {time.perf_counter() - begin:.3f} s")
    for name in ("model.embed_tokens.weight", drawn.names[len(drawn.names) // 2], drawn.names[-1]):
        assert torch.equal(weights[name], drawn.tensor(name, DEVICE))


@pytest.mark.parametrize("shape", ["llama-tiny", "moe-tiny", "mla-tiny"])
def test_a_described_folder_stands_for_the_values_of_a_written_one(shape, tmp_path) -> None:
    written = load_file(write(tmp_path / "written", shape, 7, "cuda") / "model.safetensors")
    drawn = RandomWeights.load(describe(tmp_path / "described", shape, 7))
    assert written.keys() == set(drawn.names)
    for name, tensor in written.items():
        assert torch.equal(tensor, drawn.tensor(name, DEVICE).cpu())
        wide = torch.full(tensor.shape, torch.nan, device=DEVICE)
        drawn.fill(name, wide)
        assert torch.equal(wide.cpu(), tensor.float())


@pytest.mark.timeout(300)
def test_a_tensor_of_several_chunks_is_the_same_in_place_and_beside() -> None:
    drawn = RandomWeights({**_config(), "num_hidden_layers": 1}, 0)
    name = "lm_head.weight"
    one, wide = drawn.tensor(name, DEVICE), torch.empty(drawn.drawn[name].shape, device=DEVICE)
    drawn.fill(name, wide)
    assert torch.equal(one.float(), wide)
    assert not torch.equal(one.flatten()[: 1 << 24], one.flatten()[1 << 24 : 2 << 24])


def _config() -> dict[str, object]:
    from tideforge.engine.random_weights import SHAPES

    return dict(SHAPES[SHAPE])


@pytest.mark.timeout(300)
def test_the_reference_is_the_same_with_room_and_without(model) -> None:
    tokens = np.random.default_rng(0).integers(3, 150000, 64).tolist()
    kept, anew = (ReferenceModel(model, "cuda", room).forward(tokens) for room in (None, 0))
    torch.testing.assert_close(kept.logits, anew.logits, atol=0, rtol=0)
    assert 1 < kept.logits.std() < 5


@pytest.mark.timeout(300)
def test_a_question_of_several_sequences(model, tmp_path) -> None:
    rng = np.random.default_rng(1)
    chains = [(rng.integers(3, 150000, 160).tolist(), 32) for _ in range(5)]
    with contextlib.closing(Reference.start(model, tmp_path, device="cuda")) as reference:
        for index in range(4):
            begin = time.perf_counter()
            scores = reference.scores(chains)
            print(f"question {index}: 5 sequences of 160 tokens, {LAYERS} layers: {time.perf_counter() - begin:.3f} s")
        begin = time.perf_counter()
        reference.noise("bfloat16")
        print(f"noise: {time.perf_counter() - begin:.2f} s")
        alone = reference.score(*chains[3])
    for together, one in zip(scores[3][:2], alone[:2], strict=True):
        np.testing.assert_allclose(together, one, atol=2e-3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("shape", "layers"), [("llama-3.2-1b", 2), (SHAPE, LAYERS), ("deepseek-v3", 4)])
def test_a_trial_passes(shape, layers, tmp_path, end_keeper) -> None:
    if shape == "deepseek-v3" and torch.cuda.mem_get_info()[0] < 100 << 30:
        pytest.skip("35 GB of weights, twice")
    model, state = describe(tmp_path / "model", shape, 0, layers), tmp_path / "s"
    end_keeper(state)
    shapes = tuple(RequestShape(6 + i, 6) for i in range(4))
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    workload = Workload(users=4, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (tmp_path / "workload.json").write_text(workload.to_json())
    settings = Settings(state=state, model=model, dtype="bfloat16", num_blocks=64, device="cuda")
    raw = model_for(ModelConfig.load(model).architecture)
    config = ServiceConfig(settings, tmp_path, raw, tmp_path / "workload.json", passes=1, tune=False)
    begin = time.perf_counter()
    with contextlib.closing(Bench(config)) as bench:
        print(f"{shape}, {layers} layers: bench ready after {time.perf_counter() - begin:.1f} s")
        forward = bench.incumbent.with_file("forward.py", bench.incumbent.files["forward.py"] + "\n# the same\n")
        begin = time.perf_counter()
        done = bench.evaluate(Trial("t", forward.id, "slow", "test", time.time()), forward)
        print(f"{shape}, {layers} layers: {done.outcome} {time.perf_counter() - begin:.1f} s")
        assert done.outcome is Outcome.PASSED, done.message
