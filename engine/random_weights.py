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

SHAPES: Mapping[str, Mapping[str, Any]] = {
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 128256, "num_hidden_layers": 16, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "llama-tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
}  # fmt: skip


def write(folder: Path, shape: str, seed: int = 0, device: str = "cpu") -> Path:
    """config.json and model.safetensors (bf16) of a named shape; nothing to do when they are there. Returns `folder`."""
    from safetensors.torch import save_file

    config = dict(SHAPES[shape])
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator(device).manual_seed(seed)
        save_file(
            {name: _draw(size, gain, generator).cpu() for name, size, gain in tensors(config)},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: a folder with it is whole
    return folder


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Names as in the checkpoint, shapes, and gains: a matrix keeps the spread of its input times its gain."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), 2.0
    yield "model.norm.weight", (hidden,), 0.1
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden), 2.0
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,), 0.1
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), 0.1
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden), 1.5
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden), 1.5
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden), 1.0
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries), 1.0
        yield f"{layer}.mlp.gate_proj.weight", (config["intermediate_size"], hidden), 1.0
        yield f"{layer}.mlp.up_proj.weight", (config["intermediate_size"], hidden), 1.0
        yield f"{layer}.mlp.down_proj.weight", (hidden, config["intermediate_size"]), 1.0


def _draw(shape: tuple[int, ...], gain: float, generator: torch.Generator) -> Tensor:
    """A norm's weights lie around 1; a matrix's are normal, scaled by its number of inputs."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    return (1 + gain * values if len(shape) == 1 else values * gain / math.sqrt(shape[-1])).to(torch.bfloat16)
