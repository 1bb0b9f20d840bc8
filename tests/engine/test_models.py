"""Parity of the raw forwards with transformers: prefill, chunks and decodes in one batch, few layers, written slots."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tideforge.engine import doubles
from tideforge.engine.contract import Batch, Context, ForwardFn, KVGroup, Limits, ModelConfig
from tideforge.engine.model_config import model_for
from tideforge.engine.reference_model import ReferenceModel

SMOLLM2 = Path(__file__).parents[2] / ".models" / "smollm2-135m-instruct"
BLOCK_SIZE, NUM_BLOCKS = 4, 64
FAMILIES = doubles.DOUBLES


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


def load_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def build(family: str, folder: Path, layers: range | None = None) -> tuple[ForwardFn, Context]:
    config = ModelConfig.load(folder)
    shape, count = (NUM_BLOCKS, BLOCK_SIZE, config.page_heads), config.num_hidden_layers
    keys, values = (
        tuple(torch.full((*shape, dim), float("nan")) for _ in range(count))
        for dim in (config.key_dim, config.value_dim)
    )
    ctx = Context(
        config=config,
        weights=load_weights(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        kv_groups=(KVGroup(BLOCK_SIZE, keys, values),),
        layer_range=layers or range(count),
        limits=Limits(max_model_len=256),
    )
    spec = importlib.util.spec_from_file_location(f"raw_{family}", model_for(config.architecture) / "forward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(ctx), ctx


@dataclasses.dataclass
class Chunk:
    """Tokens [start, stop) of a sequence that owns `blocks`."""

    tokens: list[int]
    start: int
    stop: int
    blocks: list[int]

    @property
    def slots(self) -> list[int]:
        return [self.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(self.start, self.stop)]


def make_batch(chunks: list[Chunk], vocab: int, every_row: bool = True) -> Batch:
    """Logits of every row, or of each chunk's last."""
    ends = np.cumsum([c.stop - c.start for c in chunks])
    wanted = torch.arange(int(ends[-1])) if every_row else torch.tensor(ends - 1)
    width = max(len(c.blocks) for c in chunks)
    decodes = sum(c.stop - c.start == 1 for c in chunks)
    return Batch(
        input_ids=torch.tensor([t for c in chunks for t in c.tokens[c.start : c.stop]]),
        positions=torch.tensor([p for c in chunks for p in range(c.start, c.stop)]),
        slot_mapping=(torch.tensor([s for c in chunks for s in c.slots]),),
        block_tables=(torch.tensor([c.blocks + [0] * (width - len(c.blocks)) for c in chunks], dtype=torch.int32),),
        seq_lens=torch.tensor([c.stop for c in chunks], dtype=torch.int32),
        query_start_loc=torch.tensor([0, *ends], dtype=torch.int32),
        logits_indices=wanted,
        logits=torch.full((len(wanted), vocab), float("nan")),
        num_decodes=decodes,
        num_prefills=len(chunks) - decodes,
        max_query_len=max(c.stop - c.start for c in chunks),
        max_seq_len=64,
    )


def run(forward: ForwardFn, chunks: list[Chunk], vocab: int, every_row: bool = True) -> Tensor:
    batch = make_batch(chunks, vocab, every_row)
    with torch.inference_mode():
        forward(batch)
    return batch.logits


def oracle(folder: Path, layers: int | None = None) -> Callable[[list[int]], Tensor]:
    """Logits [T, V] by transformers, eager, fp32."""
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if layers is not None:
        kwargs["num_hidden_layers"] = layers
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]

    return logits


def tokens_of(seed: int, count: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, count).tolist()


def close(a: Tensor, b: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def test_prefill_matches_transformers(tiny: tuple[str, Path]) -> None:
    family, folder = tiny
    forward, ctx = build(family, folder)
    vocab = ctx.config.vocab_size
    a, b = tokens_of(1, 13, vocab), tokens_of(2, 8, vocab)
    logits = run(forward, [Chunk(a, 0, 13, [9, 3, 7, 1]), Chunk(b, 0, 8, [2, 5])], vocab)
    expected = oracle(folder)
    close(logits[:13], expected(a))
    close(logits[13:], expected(b))


def test_decode_and_chunks_in_one_batch_match_transformers(tiny: tuple[str, Path]) -> None:
    family, folder = tiny
    forward, ctx = build(family, folder)
    vocab = ctx.config.vocab_size
    a, b, c = tokens_of(3, 10, vocab), tokens_of(4, 14, vocab), tokens_of(5, 6, vocab)
    blocks_a, blocks_b = [4, 8, 6], [10, 2, 11, 12]
    run(forward, [Chunk(a, 0, 9, blocks_a), Chunk(b, 0, 5, blocks_b)], vocab, every_row=False)
    mixed = [Chunk(a, 9, 10, blocks_a), Chunk(b, 5, 14, blocks_b), Chunk(c, 0, 6, [1, 3])]
    logits = run(forward, mixed, vocab)
    expected = oracle(folder)
    close(logits[:1], expected(a)[9:])
    close(logits[1:10], expected(b)[5:])
    close(logits[10:], expected(c))


def test_long_decode_matches_transformers(tiny: tuple[str, Path]) -> None:
    family, folder = tiny
    forward, ctx = build(family, folder)
    vocab = ctx.config.vocab_size
    tokens = tokens_of(6, 24, vocab)
    blocks = [7, 1, 9, 4, 2, 11]
    rows = [run(forward, [Chunk(tokens, 0, 3, blocks)], vocab)]
    rows += [run(forward, [Chunk(tokens, i, i + 1, blocks)], vocab) for i in range(3, 24)]
    close(torch.cat(rows), oracle(folder)(tokens))


def test_only_wanted_rows_get_logits(tiny: tuple[str, Path]) -> None:
    family, folder = tiny
    forward, ctx = build(family, folder)
    vocab = ctx.config.vocab_size
    tokens = tokens_of(7, 11, vocab)
    chunk = [Chunk(tokens, 0, 11, [1, 2, 3])]
    last, every = run(forward, chunk, vocab, every_row=False), run(forward, chunk, vocab)
    assert last.shape == (1, vocab)
    close(last, every[-1:])


def test_writes_its_own_slots_only(tiny: tuple[str, Path]) -> None:
    family, folder = tiny
    forward, ctx = build(family, folder)
    chunk = Chunk(tokens_of(8, 7, ctx.config.vocab_size), 0, 7, [5, 2])
    run(forward, [chunk], ctx.config.vocab_size)
    for plane in (*ctx.kv_groups[0].keys, *ctx.kv_groups[0].values):
        written = (~plane.isnan()).flatten(0, 1).all(-1).all(-1).nonzero()[:, 0].tolist()
        assert written == sorted(chunk.slots)
        assert plane.isnan().flatten(0, 1).any(-1).any(-1).sum() == NUM_BLOCKS * BLOCK_SIZE - 7


def test_layer_range_builds_the_first_layers(tiny: tuple[str, Path]) -> None:
    family, folder = tiny
    forward, ctx = build(family, folder, range(1))
    tokens = tokens_of(9, 9, ctx.config.vocab_size)
    close(run(forward, [Chunk(tokens, 0, 9, [1, 2, 3])], ctx.config.vocab_size), oracle(folder, layers=1)(tokens))
    assert ctx.kv_groups[0].keys[1].isnan().all()


def test_tiny_models_are_not_degenerate(tiny: tuple[str, Path]) -> None:
    _, folder = tiny
    vocab = ModelConfig.load(folder).vocab_size
    logits = oracle(folder)(tokens_of(10, 64, vocab))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert 2.5 < entropy.mean() < 5.5
    assert len(set(logits.argmax(-1).tolist())) > 32


def test_tiny_models_are_seeded(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        doubles.tiny_llama(tmp_path / name, seed=seed, layers=1)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_tiny_tokenizer_round_trips(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(doubles.tiny_llama(tmp_path) / "tokenizer.json"))
    text = "Tides turn, naïve 潮 <|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert 2 in ids and max(ids) < 320 and len(ids) < len(text.encode())


def test_smollm2_matches_transformers() -> None:
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip(f"{SMOLLM2} is absent: run `tideforge weights`")
    forward, _ = build("llama", SMOLLM2)
    tokens = tokens_of(11, 40, 49152)
    blocks = list(range(1, 11))
    expected = oracle(SMOLLM2)(tokens)
    prefill = run(forward, [Chunk(tokens, 0, 25, blocks)], 49152)
    chunk = run(forward, [Chunk(tokens, 25, 39, blocks)], 49152)
    decode = run(forward, [Chunk(tokens, 39, 40, blocks)], 49152)
    close(torch.cat((prefill, chunk, decode)), expected, atol=1e-3)


VARIANTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama3 positions": (doubles.tiny_llama, {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }}),
    "yarn on Qwen3": (doubles.tiny_qwen3, {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    }}),
    "one group, as Kimi-K2": (doubles.tiny_deepseek, {"n_group": 1, "topk_group": 1}),
    "pairs that are halves apart": (doubles.tiny_deepseek, {"rope_interleave": False}),
    "queries not compressed": (partial(doubles.tiny_deepseek, q_lora_rank=None), {}),
    "plain positions in latent attention": (doubles.tiny_deepseek, {"rope_scaling": None}),
    "DeepSeek's shares not rescaled": (doubles.tiny_deepseek, {"norm_topk_prob": False}),
    "Qwen3-MoE's shares not rescaled": (doubles.tiny_qwen3_moe, {"norm_topk_prob": False}),
    "Qwen2-MoE's shares rescaled": (doubles.tiny_qwen2_moe, {"norm_topk_prob": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_family_match_transformers(name: str, tmp_path: Path) -> None:
    make, figures = VARIANTS[name]
    path = make(tmp_path, seed=4) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **figures}))
    forward, ctx = build("variant", tmp_path)
    tokens = tokens_of(12, 40, ctx.config.vocab_size)
    expected = oracle(tmp_path)(tokens)
    close(run(forward, [Chunk(tokens, 0, 40, list(range(1, 11)))], ctx.config.vocab_size), expected)
    close(ReferenceModel(tmp_path).forward(tokens).logits, expected)
