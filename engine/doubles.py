"""Tiny seeded models for tests: real files in a checkpoint's form, so that nothing downstream knows the difference.

Weights are scaled so that every layer adds about as much as the residual carries and logits spread by about 2 (entropy
near 4 nats of ln(320) = 5.8): a wrong forward changes tokens, as it does on trained weights. numpy only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tideforge.engine.bpe import byte_alphabet, tokenizer_json

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 4, 2, 16, 320
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
        mlp = f"model.layers.{i}.mlp"
        weights[f"{mlp}.gate_proj.weight"] = _matrix(rng, 2 * HIDDEN, HIDDEN)
        weights[f"{mlp}.up_proj.weight"] = _matrix(rng, 2 * HIDDEN, HIDDEN)
        weights[f"{mlp}.down_proj.weight"] = _matrix(rng, HIDDEN, 2 * HIDDEN)
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    config = {**_config(layers), **kind}
    return _write(folder, config, weights)


def tiny_moe(folder: Path, seed: int = 0, layers: int = 2, experts: int = 8, experts_per_token: int = 2) -> Path:
    """A MixtralForCausalLM checkpoint in fp32, untied, under Mixtral's own tensor names. Returns `folder`."""
    rng = np.random.default_rng(seed)
    weights = _trunk(rng, layers)
    weights["lm_head.weight"] = _matrix(rng, VOCAB, HIDDEN, gain=2.0)
    for i in range(layers):
        moe = f"model.layers.{i}.block_sparse_moe"
        weights[f"{moe}.gate.weight"] = _matrix(rng, experts, HIDDEN, gain=2.0)
        for e in range(experts):
            for name in ("w1", "w2", "w3"):
                weights[f"{moe}.experts.{e}.{name}.weight"] = _matrix(rng, HIDDEN, HIDDEN)
    kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "tie_word_embeddings": False}
    sizes = {"intermediate_size": HIDDEN, "num_local_experts": experts, "num_experts_per_tok": experts_per_token}
    config = {**_config(layers), **kind, **sizes}
    return _write(folder, config, weights)


def _matrix(rng: np.random.Generator, out: int, into: int, gain: float = 1.0) -> np.ndarray:
    return (rng.standard_normal((out, into)) * gain / np.sqrt(into)).astype(np.float32)


def _trunk(rng: np.random.Generator, layers: int) -> dict[str, np.ndarray]:
    """Embedding, norms and attention. Queries and keys get a gain of 1.5, so that attention is far from uniform."""

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)

    weights = {"model.embed_tokens.weight": _matrix(rng, VOCAB, HIDDEN, gain=2.0), "model.norm.weight": norm()}
    for i in range(layers):
        layer = f"model.layers.{i}"
        weights[f"{layer}.input_layernorm.weight"] = norm()
        weights[f"{layer}.post_attention_layernorm.weight"] = norm()
        weights[f"{layer}.self_attn.q_proj.weight"] = _matrix(rng, HEADS * HEAD_DIM, HIDDEN, gain=1.5)
        weights[f"{layer}.self_attn.k_proj.weight"] = _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN, gain=1.5)
        weights[f"{layer}.self_attn.v_proj.weight"] = _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = _matrix(rng, HIDDEN, HEADS * HEAD_DIM)
    return weights


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
    """`python -m tideforge.engine.doubles llama|moe FOLDER [--layers N]` writes such a checkpoint."""
    parser = argparse.ArgumentParser(description="write a small seeded random checkpoint")
    parser.add_argument("architecture", choices=("llama", "moe"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make = tiny_llama if args.architecture == "llama" else tiny_moe
    make(args.folder, seed=args.seed, layers=args.layers)


if __name__ == "__main__":
    main()
