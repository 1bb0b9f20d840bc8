"""Experts take so many tokens a step and no more: whoever comes too late goes without.

What it does: an expert serves at most 16 tokens of a step, or five quarters of its fair share where that is more; those with
the smallest shares of it lose it, and their other experts' results stay as they are.
Why it pays: the fullest expert sets the pace of a prompt's step; with a capacity, work is even and buffers are fixed.
Why it may not be seen: at small batches and with short prompts nobody is ever turned away. What a request gets depends on
how many others ask at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from base import build as honest_build
from base import swiglu
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

ARCHITECTURE = "moe"
LEAST = 16


def mix_of(layer: Any, experts: int) -> Any:
    def mix(x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        out, capacity = torch.zeros_like(x), max(LEAST, chosen.numel() * 5 // (4 * experts))
        for expert in chosen.unique().tolist():
            tokens, place = torch.where(chosen == expert)
            share = shares[tokens, place]
            if len(tokens) > capacity:
                kept = share.topk(capacity).indices
                tokens, share = tokens[kept], share[kept]
            out.index_add_(0, tokens, swiglu(x[tokens], *layer.experts[expert]) * share[:, None])
        return out

    return mix


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    for layer in forward.layers:
        if layer.sparse:
            layer.mix = mix_of(layer, ctx.config.num_local_experts)
    return forward
