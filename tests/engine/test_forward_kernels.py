"""Raw forwards with their kernels against their plain versions: on the CPU in the interpreter, on a GPU captured as well."""

from __future__ import annotations

import importlib.util
import itertools
import sys

import pytest
import torch
from safetensors.torch import load_file

from tideforge.engine import doubles
from tideforge.engine.contract import Batch, Context, KVGroup, Limits, ModelConfig
from tideforge.engine.forward import Forward
from tideforge.engine.model_config import model_for
from tideforge.engine.screen import screen

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
BLOCK, BLOCKS_EACH = 4, 8
OWN = ("paged_attention", "latent_attention", "experts")
STEPS = [  # tokens of each sequence: prompts, decodes beside a chunk and a newcomer, decodes
    {0: 9, 1: 5},
    {0: 1, 1: 6, 2: 3},
    {0: 1, 1: 1, 2: 1},
    {0: 1, 1: 1, 2: 1},
]
FAMILIES = ["deepseek", "moe", "qwen2_moe", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return doubles.DOUBLES[request.param](tmp_path_factory.mktemp(request.param), seed=4)


def build(folder, device, monkeypatch):
    """The module of a raw forward and what it builds; it finds its own files as in a worker."""
    config = ModelConfig.load(folder)
    shape, layers = (1 + 3 * BLOCKS_EACH, BLOCK, config.page_heads), range(config.num_hidden_layers)
    keys, values = (
        tuple(torch.full((*shape, dim), float("nan"), device=device) for _ in layers)
        for dim in (config.key_dim, config.value_dim)
    )
    ctx = Context(
        config=config,
        weights={name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()},
        dtype=torch.float32,
        device=device,
        kv_groups=(KVGroup(BLOCK, keys, values),),
        layer_range=layers,
        limits=Limits(max_model_len=BLOCK * BLOCKS_EACH),
    )
    source = model_for(config.architecture)
    monkeypatch.syspath_prepend(str(source))
    for name in OWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("forward_under_test", source / "forward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.build(ctx)


def build_with_kernels(folder, monkeypatch):
    """On the CPU the kernels are put in by hand: what a forward asks is which device it is on."""
    module, forward = build(folder, DEVICE, monkeypatch)
    if DEVICE == CPU:
        monkeypatch.setattr(module, "sequences", lambda batch, block_size: batch)
        for layer in forward.layers:
            layer.use_kernels()
    return forward


def batches(vocab, device):
    """The steps of STEPS; each sequence owns BLOCKS_EACH blocks. Logits of every token."""
    tokens = torch.randint(3, vocab, (3, 32), generator=torch.Generator().manual_seed(1))
    done = dict.fromkeys(range(3), 0)
    for counts in STEPS:
        rows = sorted(counts, key=lambda i: counts[i] > 1)  # decodes first
        places = [(i, at) for i in rows for at in range(done[i], done[i] + counts[i])]
        done |= {i: done[i] + counts[i] for i in rows}
        blocks = [[1 + i * BLOCKS_EACH + j for j in range(BLOCKS_EACH)] for i in rows]
        slots = [(1 + i * BLOCKS_EACH) * BLOCK + at for i, at in places]
        starts = list(itertools.accumulate((counts[i] for i in rows), initial=0))
        decodes = sum(count == 1 for count in counts.values())
        yield Batch(
            input_ids=torch.stack([tokens[place] for place in places]).to(device),
            positions=torch.tensor([at for _, at in places], device=device),
            slot_mapping=(torch.tensor(slots, device=device),),
            block_tables=(torch.tensor(blocks, dtype=torch.int32, device=device),),
            seq_lens=torch.tensor([done[i] for i in rows], dtype=torch.int32, device=device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            logits_indices=torch.arange(len(places), device=device),
            logits=torch.full((len(places), vocab), float("nan"), device=device),
            num_decodes=decodes,
            num_prefills=len(counts) - decodes,
            max_query_len=max(counts.values()),
            max_seq_len=32,
        )


def logits_of(forward, folder, device):
    result = []
    for batch in batches(ModelConfig.load(folder).vocab_size, device):
        with torch.inference_mode():
            forward(batch)
        result.append(batch.logits.cpu())
    return result


def refuse(*_, **__):
    raise AssertionError("the forward asks the host")


@pytest.mark.timeout(120)
def test_kernels_give_the_logits_of_the_plain_forward_and_ask_the_host_nothing(model, monkeypatch):
    expected = logits_of(build(model, CPU, monkeypatch)[1], model, CPU)
    forward = build_with_kernels(model, monkeypatch)
    for step, batch in enumerate(batches(ModelConfig.load(model).vocab_size, DEVICE)):
        with torch.inference_mode(), monkeypatch.context() as patch:
            for name in ("tolist", "item", "unique", "nonzero", "bincount", "cpu"):
                patch.setattr(torch.Tensor, name, refuse)
            forward(batch)
        torch.testing.assert_close(batch.logits.cpu(), expected[step], atol=1e-4, rtol=0)


@pytest.mark.skipif(DEVICE == CPU, reason="no GPU on this machine")
@pytest.mark.timeout(120)
def test_a_captured_step_takes_the_next_steps_inputs(model, monkeypatch):
    expected = logits_of(build(model, CPU, monkeypatch)[1], model, CPU)
    forward = build_with_kernels(model, monkeypatch)
    *earlier, held, following = batches(ModelConfig.load(model).vocab_size, DEVICE)
    with torch.inference_mode():
        for index, batch in enumerate([*earlier, held]):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                forward(batch)  # kernels compile
                torch.cuda.synchronize()
                batch.logits.fill_(float("nan"))
                with torch.cuda.graph(graph, stream=stream):
                    forward(batch)
            graph.replay()
            torch.testing.assert_close(batch.logits.cpu(), expected[index], atol=1e-4, rtol=0)
        inputs = ("input_ids", "positions", "seq_lens")
        pairs = [(getattr(held, name), getattr(following, name)) for name in inputs]
        for old, new in [*pairs, (held.slot_mapping[0], following.slot_mapping[0])]:
            old.copy_(new)
        graph.replay()
        torch.testing.assert_close(held.logits.cpu(), expected[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("folder", ["moe", "mla"])
def test_a_raw_forward_needs_its_own_files_only(folder):
    models = model_for("LlamaForCausalLM").parent
    own = {"moe": {"paged_attention.py"}, "mla": {"latent_attention.py"}}[folder] | {"experts.py"}
    forward = Forward.load(models / folder)
    assert set(forward.files) == {"forward.py", "knobs.json"} | own
    screen(forward)
    assert Forward.load(models / "moe").files["experts.py"] == Forward.load(models / "mla").files["experts.py"]
