"""Seeded random checkpoints of real shapes: full-entropy, scaled so that logits spread as those of trained weights do.

A wrong forward then changes tokens. Values come from torch's generator on the given device: the same seed gives other
values on another kind of device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tideforge.engine.config import ModelConfig

SHAPES: Mapping[str, Mapping[str, Any]] = {
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 128256, "num_hidden_layers": 16, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 151936, "num_hidden_layers": 36, "hidden_size": 4096,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json; all of it takes 61 GB, see `layers` of write
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 151936, "num_hidden_layers": 48, "hidden_size": 2048,
        "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "llama-tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
}  # fmt: skip


def write(folder: Path, shape: str, seed: int = 0, device: str = "cpu", layers: int | None = None) -> Path:
    """config.json and model.safetensors (bf16) of a named shape; nothing to do when they are there. Returns `folder`.

    `layers` takes the first so many only. All tensors are in the host's memory at once.
    """
    from safetensors.torch import save_file

    config = dict(SHAPES[shape])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    path = folder / "config.json"
    if not path.exists() or json.loads(path.read_text()) != config:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        generator = torch.Generator(device).manual_seed(seed)
        save_file(
            {name: _draw(size, gain, generator).cpu() for name, size, gain in tensors(config)},
            folder / "model.safetensors",
        )
        path.write_text(json.dumps(config, indent=1))  # last: a folder with it is whole
    return folder


def tensors(raw: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Names as in the checkpoint, shapes, and gains: a matrix keeps the spread of its input times its gain."""
    config = ModelConfig.from_dict(raw)
    ends = (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", ends, 2.0
    yield "model.norm.weight", (config.hidden_size,), 1.0
    if not config.tie_word_embeddings:
        yield "lm_head.weight", ends, 2.0
    for index in range(config.num_hidden_layers):
        yield from _attention(config, f"model.layers.{index}")
        if config.is_sparse(index):
            yield from _experts(config, f"model.layers.{index}.mlp")
        else:
            yield from _mlp(f"model.layers.{index}.mlp", config.hidden_size, config.intermediate_size)


def _attention(config: ModelConfig, layer: str) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Attention is far from uniform: q and k have a gain of 1.5, in their norms where there are any."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    yield f"{layer}.input_layernorm.weight", (hidden,), 1.0
    yield f"{layer}.post_attention_layernorm.weight", (hidden,), 1.0
    yield f"{layer}.self_attn.q_proj.weight", (queries, hidden), 1.5
    yield f"{layer}.self_attn.k_proj.weight", (keys, hidden), 1.5
    yield f"{layer}.self_attn.v_proj.weight", (keys, hidden), 1.0
    yield f"{layer}.self_attn.o_proj.weight", (hidden, queries), 1.0
    if config.qk_norm:
        yield f"{layer}.self_attn.q_norm.weight", (dim,), 1.5
        yield f"{layer}.self_attn.k_norm.weight", (dim,), 1.5


def _experts(config: ModelConfig, mlp: str) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{mlp}.gate.weight", (config.num_local_experts, config.hidden_size), 2.0
    for expert in range(config.num_local_experts):
        yield from _mlp(f"{mlp}.experts.{expert}", config.hidden_size, config.moe_intermediate_size)


def _mlp(name: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{name}.gate_proj.weight", (width, hidden), 1.0
    yield f"{name}.up_proj.weight", (width, hidden), 1.0
    yield f"{name}.down_proj.weight", (hidden, width), 1.0


def _draw(shape: tuple[int, ...], gain: float, generator: torch.Generator) -> Tensor:
    """A norm's weights lie around its gain; a matrix's are normal, scaled by its number of inputs."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    return (gain * (1 + 0.1 * values) if len(shape) == 1 else values * gain / math.sqrt(shape[-1])).to(torch.bfloat16)
