"""The seam between the engine and a forward: what `build` gets, what each step gets, what must be written.

A forward is a folder with `forward.py` that defines::

    def build(ctx: Context) -> Callable[[Batch], None]

The returned callable writes fp32 logits [N, V] into `batch.logits`, writes K and V of this step's tokens only into
`batch.slot_mapping`, and reads only blocks in its own rows of `batch.block_tables`. Sampling is the engine's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture figures under the names of Hugging Face's config.json."""

    architecture: str
    vocab_size: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    num_local_experts: int = 0  # 0: dense
    num_experts_per_tok: int = 0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        heads = raw["num_attention_heads"]
        eos = raw.get("eos_token_id")
        rope = raw.get("rope_parameters") or {}
        return cls(
            architecture=raw["architectures"][0],
            vocab_size=raw["vocab_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            num_local_experts=raw.get("num_local_experts") or 0,
            num_experts_per_tok=raw.get("num_experts_per_tok") or 0,
        )

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        return cls.from_dict(json.loads((folder / "config.json").read_text()))


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Paged K and V of the layers that share block tables. keys[i], values[i]: [num_blocks, block_size, H_kv, D].

    Block 0 is the dummy page: padded rows write there and nobody reads it. Later groups may hold state slots.
    """

    block_size: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest batch that a step may carry."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048


@dataclasses.dataclass(frozen=True)
class Context:
    """What `build` gets. Weights are read-only and named as in the checkpoint."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    kv_groups: tuple[KVGroup, ...]
    layer_range: range  # a few-layer tier builds fewer layers; embedding and head are always there
    limits: Limits
    capture_sizes: tuple[int, ...] = ()  # batch sizes that the engine will capture; empty on the CPU


@dataclasses.dataclass
class Batch:
    """One step. T tokens of B sequences, N of which want logits; decodes come first, then prefill chunks.

    Shapes: input_ids [T] int64, positions [T] int64, slot_mapping per group [T] int64 (block * block_size + offset),
    block_tables per group [B, M] int32 (padded with 0), seq_lens [B] int32 (context length including this step's
    tokens), query_start_loc [B + 1] int32, logits_indices [N] int64 (rows of T), logits [N, V] fp32 (to be written).
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
    seq_lens: Tensor
    query_start_loc: Tensor
    logits_indices: Tensor
    logits: Tensor
    num_decodes: int  # host integers
    num_prefills: int
    max_query_len: int
    max_seq_len: int  # bucket: the next power of two of the longest context


ForwardFn = Callable[[Batch], None]
