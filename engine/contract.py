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
    """Paged K and V of the layers that share block tables. Tensor i belongs to the i-th of them.

    keys[i], values[i]: [num_blocks, block_size, heads, dim]. What they hold is the architecture's (ModelConfig.page_heads,
    key_dim, value_dim). Grouped queries: keys after rotation and values, each [H_kv, head_dim]. Latent attention: keys[i]
    [1, kv_lora_rank] are the normed latents that keys and values of all heads come from, values[i] [1, qk_rope_head_dim]
    the rotated part of the keys. Block 0 is the dummy page: padded rows write there and nobody reads it.

    A context may hold several groups. Group g has its own Batch.slot_mapping[g] and block_tables[g]; the config says which
    layers are whose. State of recurrent layers is such a group: block_size 1 and one block a sequence, so its table has one
    column and all of a sequence's tokens map to that slot; keys[i] is the recurrent state, values[i] what the next step needs
    of the last tokens. A sequence whose first position is 0 starts anew, whatever the slot held. Today there is one group.

    A page's precision is its tensor's dtype, not Context.dtype: an FP8 page is a float8_e4m3fn tensor, and whoever writes
    converts.
    """

    block_size: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]


@dataclasses.dataclass(frozen=True)
class Context:
    """What `build` gets. Weights are read-only and named as in the checkpoint.

    `dtype` is what activations are computed in. A weight's precision is its own tensor's dtype; today all have the endpoint's.
    An FP8 weight comes as float8_e4m3fn, with its scales under the checkpoint's name for them (`X.weight_scale_inv`); FP4 as
    uint8, two numbers a byte, with scales alike.

    All weights are views of one piece of memory that every worker maps, so a copy costs each worker its size. The keeper lays them
    out by name, numbers in it counted as such: experts of one size lie at equal distances, and a strided view over one
    part of all of them (torch.as_strided) needs no copy. Nothing promises that: compare the tensors' data_ptr() first.

    What a forward keeps on its device beside them, copies in another layout and buffers, it declares in packing.json, {"bytes": N}.
    The KV cache has so much less; a worker that holds more than declared is refused.
    """

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

    N is not tied to B: a prefill chunk before a prompt's end wants no row, and a sequence whose draft tokens are checked wants
    one row for each. Row n of the logits belongs to the sequence whose rows of T hold logits_indices[n].
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
