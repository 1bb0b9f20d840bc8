"""A llama-architecture GGUF file as a checkpoint: dequantised fp32 weights, config.json, tokenizer.json.

Names and metadata keys are those of the GGUF specification (ggml, docs/gguf.md) as written by the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tideforge.engine.bpe import tokenizer_json
from tideforge.errors import MissingExtra, UserError

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL = 3  # GGUF token type of special tokens
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(path: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (fp32), tokenizer.json and tokenizer_config.json into `folder`.

    Raises UserError when the file is no GGUF or of another architecture or tokenizer.
    """
    from safetensors.numpy import save_file

    reader = open_gguf(path)
    meta = _Metadata(path, reader)
    save_file(dict(weights(reader, meta)), folder / "model.safetensors", metadata={"format": "pt"})
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    write_json(folder / "config.json", config(meta, tied))
    write_json(folder / "tokenizer.json", tokenizer(meta))
    write_json(folder / "tokenizer_config.json", tokenizer_config(meta))


def open_gguf(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingExtra("gguf", "weights") from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise UserError(str(path), f"is not a readable GGUF file ({error})", "fetch it again") from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


class _Metadata:
    """The file's key-value pairs. A missing key raises UserError."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self.fields = path, reader.fields
        if self["general.architecture"] != "llama":
            raise UserError(str(path), f"is of architecture {self['general.architecture']}", "give a llama GGUF file")

    def __getitem__(self, key: str) -> Any:
        if key not in self.fields:
            raise UserError(str(self.path), f"lacks {key}", "give a complete llama GGUF file")
        return self.fields[key].contents()

    def get(self, key: str, default: Any) -> Any:
        return self[key] if key in self.fields else default


def weights(reader: GGUFReader, meta: _Metadata) -> Iterator[tuple[str, np.ndarray]]:
    """(checkpoint name, fp32 array) of every tensor, one dequantised at a time."""
    from gguf import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        short = tensor.name.removesuffix(".weight")
        if short in TOP_NAMES:
            yield f"{TOP_NAMES[short]}.weight", array
            continue
        _, index, part = short.split(".")
        if part in heads:
            array = unpermute(array, heads[part])
        yield f"model.layers.{index}.{LAYER_NAMES[part]}.weight", array


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's order (a pair that turns together is adjacent) to two halves a head."""
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def config(meta: _Metadata, tied: bool) -> dict[str, Any]:
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "num_hidden_layers": meta["llama.block_count"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        # stored as fp32: six digits give back the decimal that was meant
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(meta.get("llama.rope.freq_base", 10000.0)),
        "max_position_embeddings": meta["llama.context_length"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", None),
        "dtype": "float32",
    }


def tokenizer(meta: _Metadata) -> dict[str, Any]:
    """tokenizer.json. Only GPT-2 style BPE is known; pre-tokenizer `smollm` splits off every digit."""
    if meta["tokenizer.ggml.model"] != "gpt2":
        problem = f"has a {meta['tokenizer.ggml.model']} tokenizer"
        raise UserError(str(meta.path), problem, "give one with byte-level BPE")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    specials = {tokens[number]: number for number, kind in enumerate(types) if kind == CONTROL}
    merges = [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    return tokenizer_json(vocab, merges, specials, split_digits=meta.get("tokenizer.ggml.pre", "") == "smollm")


def tokenizer_config(meta: _Metadata) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    numbers = {name: meta.get(f"tokenizer.ggml.{key}_token_id", None) for name, key in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta.get("tokenizer.chat_template", None),
        **{name: tokens[number] for name, number in numbers.items() if number is not None},
    }
