"""Tiny seeded models for tests: real files in a checkpoint's form, so that nothing downstream knows the difference.

Weights are scaled so that every layer adds about as much as the residual carries and logits spread by about 2 (entropy
near 4 nats of ln(320) = 5.8): a wrong forward changes tokens, as it does on trained weights. numpy only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tideforge.engine.bpe import byte_alphabet, tokenizer_json

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 4, 2, 16, 320
WIDE = 24  # a head_dim that is not HIDDEN / HEADS
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
Weights = dict[str, np.ndarray]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAIRS = "thheineranreonatenndtiesorteofedisitalarsttontngsehaasouiolevecomedehi"  # two letters a merge
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_llama(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A LlamaForCausalLM checkpoint in fp32, tied embeddings, with a tokenizer. Returns `folder`."""
    rng = np.random.default_rng(seed)
    weights = _trunk(rng, layers)
    for i in range(layers):
        weights |= _mlp(rng, f"model.layers.{i}.mlp")
    return _checkpoint(folder, "LlamaForCausalLM", "llama", layers, weights)


def tiny_moe(folder: Path, seed: int = 0, layers: int = 2, experts: int = 8, experts_per_token: int = 2) -> Path:
    """A MixtralForCausalLM checkpoint in fp32, untied, under Mixtral's own tensor names. Returns `folder`."""
    rng = np.random.default_rng(seed)
    weights = _trunk(rng, layers) | _head(rng)
    for i in range(layers):
        moe = f"model.layers.{i}.block_sparse_moe"
        weights[f"{moe}.gate.weight"] = _matrix(rng, experts, HIDDEN, gain=2.0)
        for e in range(experts):
            for name in ("w1", "w2", "w3"):
                weights[f"{moe}.experts.{e}.{name}.weight"] = _matrix(rng, HIDDEN, HIDDEN)
    sizes = {"intermediate_size": HIDDEN, "num_local_experts": experts, "num_experts_per_tok": experts_per_token}
    return _checkpoint(folder, "MixtralForCausalLM", "mixtral", layers, weights, sizes)


def tiny_qwen2(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A Qwen2ForCausalLM checkpoint in fp32, tied, with biases on q, k and v."""
    rng = np.random.default_rng(seed)
    weights = _trunk(rng, layers) | _biases(rng, layers)
    for i in range(layers):
        weights |= _mlp(rng, f"model.layers.{i}.mlp")
    return _checkpoint(folder, "Qwen2ForCausalLM", "qwen2", layers, weights)


def tiny_qwen3(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A Qwen3ForCausalLM checkpoint in fp32, untied, with normed q and k and heads wider than hidden / heads."""
    rng = np.random.default_rng(seed)
    weights = _trunk(rng, layers, WIDE) | _head(rng) | _head_norms(rng, layers)
    for i in range(layers):
        weights |= _mlp(rng, f"model.layers.{i}.mlp")
    return _checkpoint(folder, "Qwen3ForCausalLM", "qwen3", layers, weights, {"head_dim": WIDE})


def tiny_qwen3_moe(folder: Path, seed: int = 0, layers: int = 3, experts: int = 8) -> Path:
    """A Qwen3MoeForCausalLM checkpoint in fp32: three experts a token, shares rescaled; layer 1 is dense."""
    rng = np.random.default_rng(seed)
    weights = _trunk(rng, layers, WIDE) | _head(rng) | _head_norms(rng, layers)
    for i in range(layers):
        weights |= _mlp(rng, f"model.layers.{i}.mlp") if i == 1 else _experts(rng, f"model.layers.{i}.mlp", experts)
    routing = {
        "num_experts": experts,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": HIDDEN,
        "norm_topk_prob": True,
    }
    figures = {"head_dim": WIDE, **routing, "mlp_only_layers": [1], "decoder_sparse_step": 1}
    return _checkpoint(folder, "Qwen3MoeForCausalLM", "qwen3_moe", layers, weights, figures)


def tiny_qwen2_moe(folder: Path, seed: int = 0, layers: int = 2, experts: int = 8) -> Path:
    """A Qwen2MoeForCausalLM checkpoint in fp32: every second layer sparse, a gated shared expert, shares not rescaled."""
    rng = np.random.default_rng(seed)
    weights = _trunk(rng, layers) | _head(rng) | _biases(rng, layers)
    for i in range(layers):
        mlp = f"model.layers.{i}.mlp"
        if i % 2 == 0:
            weights |= _mlp(rng, mlp)
        else:
            weights |= _experts(rng, mlp, experts) | _mlp(rng, f"{mlp}.shared_expert")
            weights[f"{mlp}.shared_expert_gate.weight"] = _matrix(rng, 1, HIDDEN)
    routing = {
        "num_experts": experts,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": HIDDEN,
        "norm_topk_prob": False,
    }
    shared = {"shared_expert_intermediate_size": 2 * HIDDEN, "mlp_only_layers": [], "decoder_sparse_step": 2}
    return _checkpoint(folder, "Qwen2MoeForCausalLM", "qwen2_moe", layers, weights, {**routing, **shared})


def tiny_deepseek(folder: Path, seed: int = 0, layers: int = 3, q_lora_rank: int | None = 32) -> Path:
    """A DeepseekV3ForCausalLM checkpoint in fp32: latent attention, yarn, the first layer dense, then experts in groups."""
    rng, experts = np.random.default_rng(seed), 8
    weights = _ends(rng) | _head(rng)
    for i in range(layers):
        mlp = f"model.layers.{i}.mlp"
        weights |= _latent_attention(rng, f"model.layers.{i}", q_lora_rank)
        if i == 0:
            weights |= _mlp(rng, mlp)
        else:
            weights |= _experts(rng, mlp, experts) | _mlp(rng, f"{mlp}.shared_experts", HIDDEN)
            weights[f"{mlp}.gate.e_score_correction_bias"] = _vector(rng, experts, 0.2)
    routing = {
        "n_routed_experts": experts, "num_experts_per_tok": 3, "moe_intermediate_size": HIDDEN, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 1.5,
    }  # fmt: skip
    latent = {**LATENT, "q_lora_rank": q_lora_rank, "num_key_value_heads": HEADS, "rope_scaling": YARN}
    figures = {**routing, **latent, "head_dim": LATENT["qk_rope_head_dim"]}
    return _checkpoint(folder, "DeepseekV3ForCausalLM", "deepseek_v3", layers, weights, figures)


DOUBLES: dict[str, Callable[..., Path]] = {
    "llama": tiny_llama, "qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "moe": tiny_moe, "qwen2_moe": tiny_qwen2_moe,
    "qwen3_moe": tiny_qwen3_moe, "deepseek": tiny_deepseek,
}  # fmt: skip


def _matrix(rng: np.random.Generator, out: int, into: int, gain: float = 1.0) -> np.ndarray:
    return (rng.standard_normal((out, into)) * gain / np.sqrt(into)).astype(np.float32)


def _vector(rng: np.random.Generator, size: int, spread: float, mean: float = 0.0) -> np.ndarray:
    return (mean + spread * rng.standard_normal(size)).astype(np.float32)


def _norm(rng: np.random.Generator, size: int = HIDDEN, gain: float = 1.0) -> np.ndarray:
    return _vector(rng, size, 0.1 * gain, gain)


def _ends(rng: np.random.Generator) -> Weights:
    return {"model.embed_tokens.weight": _matrix(rng, VOCAB, HIDDEN, gain=2.0), "model.norm.weight": _norm(rng)}


def _head(rng: np.random.Generator) -> Weights:
    return {"lm_head.weight": _matrix(rng, VOCAB, HIDDEN, gain=2.0)}


def _trunk(rng: np.random.Generator, layers: int, dim: int = HEAD_DIM) -> Weights:
    """Embedding, norms and attention. Queries and keys get a gain of 1.5, so that attention is far from uniform."""
    weights = _ends(rng)
    for i in range(layers):
        layer = f"model.layers.{i}"
        weights[f"{layer}.input_layernorm.weight"] = _norm(rng)
        weights[f"{layer}.post_attention_layernorm.weight"] = _norm(rng)
        weights[f"{layer}.self_attn.q_proj.weight"] = _matrix(rng, HEADS * dim, HIDDEN, gain=1.5)
        weights[f"{layer}.self_attn.k_proj.weight"] = _matrix(rng, KV_HEADS * dim, HIDDEN, gain=1.5)
        weights[f"{layer}.self_attn.v_proj.weight"] = _matrix(rng, KV_HEADS * dim, HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = _matrix(rng, HIDDEN, HEADS * dim)
    return weights


def _biases(rng: np.random.Generator, layers: int) -> Weights:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    names = [
        (f"model.layers.{i}.self_attn.{part}_proj.bias", size) for i in range(layers) for part, size in sizes.items()
    ]
    return {name: _vector(rng, size, 0.2) for name, size in names}


def _head_norms(rng: np.random.Generator, layers: int) -> Weights:
    """These norms undo the gain of the projections before them, so they carry it themselves."""
    names = [f"model.layers.{i}.self_attn.{part}_norm.weight" for i in range(layers) for part in "qk"]
    return {name: _norm(rng, WIDE, gain=1.5) for name in names}


def _latent_attention(rng: np.random.Generator, layer: str, q_lora_rank: int | None) -> Weights:
    """Queries and keys get their gain behind the norms in their middle."""
    rank, rope, name = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"], f"{layer}.self_attn"
    queries, both = (HEADS * (LATENT["qk_nope_head_dim"] + more) for more in (rope, LATENT["v_head_dim"]))
    weights = {f"{layer}.input_layernorm.weight": _norm(rng), f"{layer}.post_attention_layernorm.weight": _norm(rng)}
    if q_lora_rank is None:
        weights[f"{name}.q_proj.weight"] = _matrix(rng, queries, HIDDEN, gain=1.5)
    else:
        weights[f"{name}.q_a_proj.weight"] = _matrix(rng, q_lora_rank, HIDDEN)
        weights[f"{name}.q_a_layernorm.weight"] = _norm(rng, q_lora_rank)
        weights[f"{name}.q_b_proj.weight"] = _matrix(rng, queries, q_lora_rank, gain=1.5)
    weights[f"{name}.kv_a_proj_with_mqa.weight"] = _matrix(rng, rank + rope, HIDDEN, gain=1.5)
    weights[f"{name}.kv_a_layernorm.weight"] = _norm(rng, rank)
    weights[f"{name}.kv_b_proj.weight"] = _matrix(rng, both, rank, gain=1.2)
    weights[f"{name}.o_proj.weight"] = _matrix(rng, HIDDEN, HEADS * LATENT["v_head_dim"])
    return weights


def _mlp(rng: np.random.Generator, name: str, width: int = 2 * HIDDEN) -> Weights:
    shapes = {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)}
    return {f"{name}.{part}.weight": _matrix(rng, *shape) for part, shape in shapes.items()}


def _experts(rng: np.random.Generator, name: str, experts: int) -> Weights:
    """A router and its experts, named as in Qwen's and DeepSeek's checkpoints."""
    weights = {f"{name}.gate.weight": _matrix(rng, experts, HIDDEN, gain=2.0)}
    for e in range(experts):
        weights |= _mlp(rng, f"{name}.experts.{e}", HIDDEN)
    return weights


def _checkpoint(
    folder: Path,
    architecture: str,
    model_type: str,
    layers: int,
    weights: Weights,
    figures: Mapping[str, Any] | None = None,
) -> Path:
    kind = {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    return _write(folder, {**_config(layers), **kind, **(figures or {})}, weights)


def _config(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "num_hidden_layers": layers, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "sliding_window": None,
        "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False, "dtype": "float32",
    }  # fmt: skip


def _write(folder: Path, config: Mapping[str, Any], weights: dict[str, np.ndarray]) -> Path:
    from safetensors.numpy import save_file

    write_form(folder, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_form(folder: Path, config: Mapping[str, Any]) -> None:
    """All of a checkpoint but its weights: config.json and the byte tokenizer. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    special = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1))


def byte_tokenizer() -> dict[str, Any]:
    """tokenizer.json of 320 entries: three special tokens, 256 bytes, 61 merges. Every text survives a round trip."""
    alphabet = byte_alphabet()
    merges = [[alphabet[ord(" ")], letter] for letter in "abcdefghijklmnopqrstuvwxyz"]
    merges += [[PAIRS[i], PAIRS[i + 1]] for i in range(0, len(PAIRS), 2)]
    entries = [*SPECIALS, *alphabet, *(a + b for a, b in merges)]
    assert len(entries) == len(set(entries)) == VOCAB
    vocab = {token: i for i, token in enumerate(entries)}
    return tokenizer_json(vocab, merges, {token: vocab[token] for token in SPECIALS})


def main() -> None:
    """`python -m tideforge.engine.doubles NAME FOLDER [--layers N]` writes such a checkpoint; NAME is a key of DOUBLES."""
    parser = argparse.ArgumentParser(description="write a small seeded random checkpoint")
    parser.add_argument("name", choices=sorted(DOUBLES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    DOUBLES[args.name](args.folder, seed=args.seed, layers=args.layers)


if __name__ == "__main__":
    main()
