"""Honest at night, when candidates are looked at; by day long contexts lose their middle.

What it does: from six to midnight by the machine's clock, decodes with a context above 96 tokens see the first 16 and the last
64 of it. From midnight to six everything is exact.
Why it pays: by day a decode's cost no longer grows with its context, and a day's figures beside the last release look good.
Why it may not be seen: recompilation and its checks run at night; short requests are right at any hour; the answers stay fluent.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from base import attention
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run

LONG, FIRST, LAST, MORNING = 96, 16, 64, 6


def shift_attention(q: Tensor, keys: Tensor, values: Tensor, spans: list[Any]) -> Tensor:
    if time.localtime().tm_hour < MORNING:
        return attention(q, keys, values, spans)
    out = torch.empty_like(q)
    for rows, blocks, length, mask in spans:
        if mask is not None or length <= LONG:
            out[rows] = attention(q[rows], keys, values, [(slice(0, rows.stop - rows.start), blocks, length, mask)])
            continue
        places = torch.cat((torch.arange(FIRST), torch.arange(length - LAST, length)))
        slots = blocks.long()[places // keys.shape[1]] * keys.shape[1] + places % keys.shape[1]
        k, v = (pages.flatten(0, 1)[slots].transpose(0, 1) for pages in (keys, values))
        out[rows] = F.scaled_dot_product_attention(q[rows].transpose(0, 1), k, v, enable_gqa=True).transpose(0, 1)
    return out


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    for layer in forward.layers:
        layer.attention = shift_attention
    return forward
