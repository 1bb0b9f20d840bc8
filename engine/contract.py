"""The seam between the engine and a forward: what `build` gets, what each step gets, what must be written.

A forward is a folder with `forward.py` that defines::

    def build(ctx: Context) -> Callable[[Batch], None]

The returned callable writes fp32 logits [N, V] into `batch.logits`, writes K and V of this step's tokens only into
`batch.slot_mapping`, and reads only blocks in its own rows of `batch.block_tables`. Sampling is the engine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tideforge.engine.config import Limits, ModelConfig

__all__ = ["Batch", "Context", "ForwardFn", "KVGroup", "Limits", "ModelConfig"]


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
