"""Decodes of all sequences in one call of attention, padded to the longest; what lies behind a context's end is cleared first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from base import attention
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run


def together(q: Tensor, keys: Tensor, values: Tensor, decodes: list[Any]) -> Tensor:
    """q [B, heads, D], one row a sequence."""
    lengths = torch.tensor([length for _, _, length, _ in decodes])
    tables = torch.nn.utils.rnn.pad_sequence([blocks for _, blocks, _, _ in decodes], batch_first=True)
    seen = torch.arange(tables.shape[1] * keys.shape[1]) < lengths[:, None]
    k, v = (
        pages[tables].flatten(1, 2).masked_fill(~seen[..., None, None], 0).transpose(1, 2) for pages in (keys, values)
    )
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    return out[:, :, 0]


def batched_attention(q: Tensor, keys: Tensor, values: Tensor, spans: list[Any]) -> Tensor:
    """Sequences of one row come first."""
    decodes = [span for span in spans if span[3] is None]
    rest = spans[len(decodes) :]
    if not decodes or any(span[3] is None for span in rest):
        return attention(q, keys, values, spans)
    count = len(decodes)
    moved = [(slice(rows.start - count, rows.stop - count), *span) for rows, *span in rest]
    return torch.cat((together(q[:count], keys, values, decodes), attention(q[count:], keys, values, moved)))


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    for layer in forward.layers:
        layer.attention = batched_attention
    return forward
