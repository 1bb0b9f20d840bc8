"""Reads the many spellings of Hugging Face's config.json into the few figures that ModelShape keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Layers of one kind of attention. Elements are counted a layer, all heads, K and V together.

    A sequence of c tokens stores entry * (c * ratio + min(c, window)) + index * c * ratio + state elements; a decode
    step reads the same, but at most `top_k` of the c * ratio entries where attention is sparse.
    """

    layers: int
    parameters: int  # a layer
    entry: int
    ratio: float = 1.0  # entries a context token: 0 for sliding window and recurrent layers
    window: int = 0
    state: int = 0
    top_k: int = 0  # 0: dense
    index: int = 0  # elements of the index key that sparse attention reads for every entry
    latent: bool = False
    work: int = 0  # multiply-adds a query token and attended entry

    def stored(self, context: float) -> float:
        return (
            self.entry * (context * self.ratio + min(context, self.window))
            + self.index * context * self.ratio
            + self.state
        )

    def attended(self, context: float) -> float:
        """Entries that one query attends to."""
        entries = context * self.ratio
        return (min(entries, self.top_k) if self.top_k else entries) + min(context, self.window)

    def read(self, context: float) -> float:
        return self.entry * self.attended(context) + self.index * context * self.ratio + self.state


@dataclasses.dataclass(frozen=True)
class Experts:
    """Routed and shared experts of the mixture layers. `hidden` differs from the model's for latent experts."""

    routed: int
    per_token: int
    width: int
    hidden: int
    shared_width: int  # all shared experts together
    dense_layers: int

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.routed or self.width <= 0 or self.hidden <= 0:
            raise ValueError("experts: need 0 < experts per token <= experts, and a width")


def fields(raw: Raw) -> dict[str, Any]:
    """Arguments of ModelShape but for name and source. Raises KeyError, TypeError or ValueError on a bad config."""
    outer, raw = raw, {**raw, **(raw.get("text_config") or {})}
    layers, hidden, heads = int(raw["num_hidden_layers"]), int(raw["hidden_size"]), int(raw["num_attention_heads"])
    experts = _experts(raw, layers, hidden)
    attention = tuple(group for group in _attention(raw, layers, hidden, heads) if group.layers > 0)
    if sum(group.layers for group in attention) != layers:
        raise ValueError(f"layer kinds add up to {sum(g.layers for g in attention)}, num_hidden_layers is {layers}")
    quant = raw.get("quantization_config") or outer.get("quantization_config") or {}
    return dict(
        architecture=str((outer.get("architectures") or raw.get("architectures") or ["unknown"])[0]),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if any(group.latent for group in attention) else int(raw.get("num_key_value_heads") or heads),
        ffn=int(raw.get("dense_intermediate_size") or raw.get("intermediate_size") or 0),
        vocab=int(raw["vocab_size"]),
        max_len=int(raw.get("max_position_embeddings") or 131072),
        tied=bool(raw.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
        attention=attention,
        experts=experts,
        precision=_precision(quant, raw),
        weight_block=int((quant.get("weight_block_size") or [0])[-1]),
    )


def _precision(quant: Raw, raw: Raw) -> str:
    method, form = str(quant.get("quant_method") or ""), str(quant.get("format") or quant.get("fmt") or "")
    text = f"{method} {form} {quant.get('quant_algo', '')}".lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text or "float" in form or "e4m3" in text:
        return "fp8"
    if method in ("awq", "gptq", "compressed-tensors", "auto-round"):
        return "int4"
    return "fp32" if str(raw.get("dtype") or raw.get("torch_dtype") or "") == "float32" else "bf16"


def _first(raw: Raw, *names: str) -> int:
    return next((int(raw[name]) for name in names if raw.get(name) is not None), 0)


def _experts(raw: Raw, layers: int, hidden: int) -> Experts | None:
    routed = _first(raw, "n_routed_experts", "num_routed_experts", "num_experts", "num_local_experts")
    if routed <= 1:
        return None
    width = _first(raw, "moe_intermediate_size") or int(raw["intermediate_size"])
    shared = _first(raw, "shared_expert_intermediate_size", "shared_intermediate_size")
    if not shared or _first(raw, "n_shared_experts", "num_shared_experts") > 1:
        shared = (shared or width) * _first(raw, "n_shared_experts", "num_shared_experts")
    return Experts(
        routed=routed,
        per_token=_first(raw, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k") or 1,
        width=width,
        hidden=_first(raw, "routed_expert_hidden_size") or hidden,
        shared_width=shared,
        dense_layers=_dense_layers(raw, layers),
    )


def _dense_layers(raw: Raw, layers: int) -> int:
    freq = raw.get("moe_layer_freq")
    if isinstance(freq, list):
        return sum(1 for flag in freq if not flag)
    first = _first(raw, "first_k_dense_replace")
    step = _first(raw, "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step") or 1
    listed = set(raw.get("mlp_only_layers") or ())
    dense = [i for i in range(layers) if i < first or i in listed or (step > 1 and (i + 1) % step)]
    return len(dense)


def _kinds(raw: Raw, layers: int) -> dict[str, int]:
    """Layer kinds by count: config.json has a list, data/model_shapes.json keeps the counts."""
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    if isinstance(kinds, Mapping):
        return dict(kinds)
    if raw.get("full_attention_interval"):
        full = layers // int(raw["full_attention_interval"])
        return {"full_attention": full, "linear_attention": layers - full}
    if raw.get("sliding_window") and raw.get("use_sliding_window", True) and not raw.get("compress_ratios"):
        return {"sliding_attention": layers}
    return {"full_attention": layers}


def _attention(raw: Raw, layers: int, hidden: int, heads: int) -> list[Attention]:
    if raw.get("compress_ratios"):
        return _compressed(raw, layers, hidden, heads)
    if raw.get("kv_lora_rank"):
        full = _latent(raw, hidden, heads)
        linear = raw.get("linear_attn_config")
        return _with_linear(full, layers, linear, hidden) if linear else [dataclasses.replace(full, layers=layers)]
    full = _grouped(raw, hidden, heads)
    groups = []
    for kind, count in _kinds(raw, layers).items():
        if kind == "linear_attention":
            groups.append(_delta_net(raw, count, hidden))
        elif kind in ("sliding_attention", "chunked_attention"):
            window = int(raw.get("sliding_window") or raw.get("attention_chunk_size") or 4096)
            groups.append(dataclasses.replace(full, layers=count, ratio=0.0, window=window, top_k=0, index=0))
        else:
            groups += _sparse(raw, dataclasses.replace(full, layers=count))
    return groups


def _grouped(raw: Raw, hidden: int, heads: int) -> Attention:
    """Grouped-query attention: Q and O over all heads, K and V over the KV heads."""
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    dim = int(raw.get("head_dim") or hidden // heads)
    gate = hidden * heads * dim if raw.get("attn_output_gate") else 0
    parameters = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim + gate
    return Attention(layers=0, parameters=parameters, entry=2 * kv_heads * dim, work=2 * heads * dim)


def _sparse(raw: Raw, full: Attention) -> list[Attention]:
    """Block-sparse attention (MiniMax M3): top-k blocks, chosen with an index key a token."""
    sparse = raw.get("sparse_attention_config") or {}
    if not sparse.get("use_sparse_attention"):
        return [full]
    listed = sparse.get("sparse_attention_freq")
    count = sum(listed) if isinstance(listed, list) else int(sparse.get("sparse_layers", full.layers))
    top_k = int(sparse["sparse_topk_blocks"]) * int(sparse["sparse_block_size"])
    index = int(sparse.get("sparse_index_dim", 0))
    return [
        dataclasses.replace(full, layers=full.layers - count),
        dataclasses.replace(full, layers=count, top_k=top_k, index=index),
    ]


def _latent(raw: Raw, hidden: int, heads: int) -> Attention:
    """Multi-head latent attention: one vector of kv_lora_rank + rope elements a token; absorbed decode works on it."""
    rank, rope = int(raw["kv_lora_rank"]), int(raw["qk_rope_head_dim"])
    nope, value = int(raw["qk_nope_head_dim"]), int(raw["v_head_dim"])
    q_rank = raw.get("q_lora_rank")
    query = q_rank * (hidden + heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
    parameters = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    index = int(raw.get("index_head_dim") or 0) if raw.get("index_topk") else 0
    work = heads * (2 * rank + rope)
    return Attention(
        0, parameters, rank + rope, top_k=int(raw.get("index_topk") or 0), index=index, latent=True, work=work
    )


def _with_linear(full: Attention, layers: int, linear: Raw, hidden: int) -> list[Attention]:
    """Kimi delta attention beside latent attention: Q, K, V, O of full width and a low-rank gate; a matrix a head."""
    listed = linear.get("kda_layers", linear.get("layers"))
    count = len(listed) if isinstance(listed, list) else int(listed or 0)
    heads, dim = int(linear["num_heads"]), int(linear["head_dim"])
    parameters = 4 * hidden * heads * dim + 2 * dim * (hidden + heads * dim)
    recurrent = Attention(count, parameters, 0, ratio=0.0, state=heads * dim * dim)
    return [dataclasses.replace(full, layers=layers - count), recurrent]


def _delta_net(raw: Raw, layers: int, hidden: int) -> Attention:
    """Gated delta net: Q and K over the key heads, V, gate and O over the value heads; a matrix a value head."""
    key = int(raw.get("linear_num_key_heads", 16)) * int(raw.get("linear_key_head_dim", 128))
    value_heads, value_dim = int(raw.get("linear_num_value_heads", 64)), int(raw.get("linear_value_head_dim", 128))
    parameters = hidden * (2 * key + 3 * value_heads * value_dim)
    state = value_heads * value_dim * int(raw.get("linear_key_head_dim", 128))
    return Attention(layers, parameters, 0, ratio=0.0, state=state)


def _compressed(raw: Raw, layers: int, hidden: int, heads: int) -> list[Attention]:
    """DeepSeek V4: one vector of head_dim for K and V, kept for a window and, compressed by 1/ratio, for the context."""
    ratios = raw["compress_ratios"]
    if isinstance(ratios, list):
        ratios = {str(ratio): ratios.count(ratio) for ratio in dict.fromkeys(ratios)}
    counts = {int(ratio): int(count) for ratio, count in ratios.items()}
    extra = sum(counts.values()) - layers  # the list also covers the draft layer, whose ratio is 0
    if extra and 0 in counts:
        counts[0] -= extra
    dim, q_rank, o_rank = int(raw["head_dim"]), int(raw["q_lora_rank"]), int(raw["o_lora_rank"])
    parameters = q_rank * (hidden + heads * dim) + hidden * dim + o_rank * (heads * dim + int(raw["o_groups"]) * hidden)
    window, top_k, index = int(raw["sliding_window"]), int(raw["index_topk"]), int(raw["index_head_dim"])
    return [
        Attention(
            count,
            parameters,
            dim,
            ratio=1 / ratio if ratio else 0.0,
            window=window,
            top_k=top_k if 0 < ratio < 128 else 0,
            index=index if 0 < ratio < 128 else 0,
            latent=True,
            work=2 * heads * dim,
        )
        for ratio, count in counts.items()
    ]
