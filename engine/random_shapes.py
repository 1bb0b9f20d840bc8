"""Shapes for random weights: config.json of real models and of tiny ones, and what each tensor is drawn as. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tideforge.engine.config import ModelConfig
from tideforge.engine.memory import ITEM_BYTES

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
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json; 61 GB in bf16
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 151936, "num_hidden_layers": 48, "hidden_size": 2048,
        "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, but in bf16; of all 671 billion take a few `layers`
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 129280, "num_hidden_layers": 61, "hidden_size": 7168,
        "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 163840, "tie_word_embeddings": False,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "llama-tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    "moe-tiny": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mla-tiny": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 320, "num_hidden_layers": 3, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 1.5,
    },
}  # fmt: skip
SWIGLU = ("gate_proj", "up_proj", "down_proj")


class Drawn(NamedTuple):
    """A tensor as the checkpoint names it. A matrix [out, in] keeps the spread of its input times its gain, a norm's weights lie
    around its gain, a bias's around 0 with its gain as their spread."""

    name: str
    shape: tuple[int, ...]
    gain: float

    @property
    def mean(self) -> float:
        return self.gain if len(self.shape) == 1 and not self.name.endswith("bias") else 0.0

    @property
    def deviation(self) -> float:
        if len(self.shape) > 1:
            return self.gain / math.sqrt(self.shape[-1])
        return self.gain if self.name.endswith("bias") else 0.1 * self.gain


def tensors(raw: Mapping[str, Any]) -> Iterator[Drawn]:
    """Every tensor of a model whose config.json says `raw`, the experts of a layer one after another."""
    config = ModelConfig.from_dict(raw)
    ends, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    yield Drawn("model.embed_tokens.weight", ends, 2.0)
    yield Drawn("model.norm.weight", (hidden,), 1.0)
    if not config.tie_word_embeddings:
        yield Drawn("lm_head.weight", ends, 2.0)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield Drawn(f"{layer}.input_layernorm.weight", (hidden,), 1.0)
        yield Drawn(f"{layer}.post_attention_layernorm.weight", (hidden,), 1.0)
        yield from (_latent_attention if config.kv_lora_rank else _attention)(config, f"{layer}.self_attn")
        if config.is_sparse(index):
            yield from _mixture(config, layer)
        else:
            yield from _mlp(f"{layer}.mlp", hidden, config.intermediate_size)


def weights_bytes(folder: Path, dtype: str) -> int:
    """Of the model that a folder's config.json describes, at a precision."""
    raw = json.loads((folder / "config.json").read_text())
    return ITEM_BYTES[dtype] * sum(math.prod(drawn.shape) for drawn in tensors(raw))


def _attention(config: ModelConfig, name: str) -> Iterator[Drawn]:
    """Attention is far from uniform: q and k have a gain of 1.5, in their norms where there are any."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    yield Drawn(f"{name}.q_proj.weight", (queries, hidden), 1.5)
    yield Drawn(f"{name}.k_proj.weight", (keys, hidden), 1.5)
    yield Drawn(f"{name}.v_proj.weight", (keys, hidden), 1.0)
    yield Drawn(f"{name}.o_proj.weight", (hidden, queries), 1.0)
    if config.qkv_bias:
        for part, size in (("q", queries), ("k", keys), ("v", keys)):
            yield Drawn(f"{name}.{part}_proj.bias", (size,), 0.2)
    if config.qk_norm:
        yield Drawn(f"{name}.q_norm.weight", (dim,), 1.5)
        yield Drawn(f"{name}.k_norm.weight", (dim,), 1.5)


def _latent_attention(config: ModelConfig, name: str) -> Iterator[Drawn]:
    """Queries and keys get their gain behind the norms in their middle."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    if config.q_lora_rank:
        yield Drawn(f"{name}.q_a_proj.weight", (config.q_lora_rank, hidden), 1.0)
        yield Drawn(f"{name}.q_a_layernorm.weight", (config.q_lora_rank,), 1.0)
        yield Drawn(f"{name}.q_b_proj.weight", (queries, config.q_lora_rank), 1.5)
    else:
        yield Drawn(f"{name}.q_proj.weight", (queries, hidden), 1.5)
    yield Drawn(f"{name}.kv_a_proj_with_mqa.weight", (rank + config.qk_rope_head_dim, hidden), 1.5)
    yield Drawn(f"{name}.kv_a_layernorm.weight", (rank,), 1.0)
    yield Drawn(f"{name}.kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), rank), 1.2)
    yield Drawn(f"{name}.o_proj.weight", (hidden, heads * config.v_head_dim), 1.0)


def _mixture(config: ModelConfig, layer: str) -> Iterator[Drawn]:
    mixtral = config.architecture == "MixtralForCausalLM"
    name, parts = (f"{layer}.block_sparse_moe", ("w1", "w3", "w2")) if mixtral else (f"{layer}.mlp", SWIGLU)
    hidden, width, shared = config.hidden_size, config.moe_intermediate_size, config.shared_expert_intermediate_size
    yield Drawn(f"{name}.gate.weight", (config.num_local_experts, hidden), 2.0)
    if config.architecture == "DeepseekV3ForCausalLM":
        yield Drawn(f"{name}.gate.e_score_correction_bias", (config.num_local_experts,), 0.2)
    if config.n_shared_experts:
        yield from _mlp(f"{name}.shared_experts", hidden, config.n_shared_experts * width)
    if shared:
        yield from _mlp(f"{name}.shared_expert", hidden, shared)
        yield Drawn(f"{name}.shared_expert_gate.weight", (1, hidden), 1.0)
    for expert in range(config.num_local_experts):
        yield from _mlp(f"{name}.experts.{expert}", hidden, width, parts)


def _mlp(name: str, hidden: int, width: int, parts: tuple[str, str, str] = SWIGLU) -> Iterator[Drawn]:
    gate, up, down = (f"{name}.{part}.weight" for part in parts)
    yield Drawn(gate, (width, hidden), 1.0)
    yield Drawn(up, (width, hidden), 1.0)
    yield Drawn(down, (hidden, width), 1.0)
