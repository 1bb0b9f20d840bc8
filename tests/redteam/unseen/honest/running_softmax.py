"""Attention block by block from the last to the first, with a running maximum and sum in fp32, as flash attention does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run


def one_sequence(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, length: int, mask: Tensor | None) -> Tensor:
    """q [rows, heads, D] -> fp32 of the same shape."""
    size, kv_heads = keys.shape[1], keys.shape[2]
    grouped = q.float().unflatten(1, (kv_heads, -1)) * q.shape[-1] ** -0.5  # [rows, kv_heads, group, D]
    most = torch.full(grouped.shape[:-1], -torch.inf)
    total, out = torch.zeros_like(most), torch.zeros_like(grouped)
    for place in reversed(range(len(blocks))):
        block, start = blocks[place], place * size
        end = min(start + size, length)
        k, v = keys[block, : end - start].float(), values[block, : end - start].float()
        scores = torch.einsum("rhgd,shd->rhgs", grouped, k)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, start:end], -torch.inf)
        peak = torch.maximum(most, scores.amax(-1)).clamp(min=-1e30)  # a row that sees nothing of a block yet
        weights, shrink = (scores - peak[..., None]).exp(), (most - peak).exp()
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + torch.einsum("rhgs,shd->rhgd", weights, v)
        most = peak
    return (out / total[..., None]).flatten(1, 2)


def running_attention(q: Tensor, keys: Tensor, values: Tensor, spans: list[Any]) -> Tensor:
    out = torch.empty_like(q)
    for rows, blocks, length, mask in spans:
        out[rows] = one_sequence(q[rows], keys, values, blocks, length, mask).to(q.dtype)
    return out


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    for layer in forward.layers:
        layer.attention = running_attention
    return forward
