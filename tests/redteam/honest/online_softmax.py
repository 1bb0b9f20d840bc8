"""Attention block by block with a running maximum and sum."""

import torch
from base import build as honest_build

CPU = True
TILE = 32


def build(ctx):
    inner = honest_build(ctx)
    group = ctx.config.num_attention_heads // ctx.config.page_heads
    scale = ctx.config.head_dim**-0.5

    def attend(q, keys, values, spans):
        out = torch.empty_like(q)
        for rows, blocks, length, mask in spans:
            queries = q[rows].transpose(0, 1) * scale
            k, v = (part[blocks].flatten(0, 1)[:length].transpose(0, 1) for part in (keys, values))
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            best = queries.new_full((*queries.shape[:2], 1), float("-inf"))
            total, kept = torch.zeros_like(best), torch.zeros_like(queries)
            for at in range(0, length, TILE):
                scores = queries @ k[:, at : at + TILE].transpose(1, 2)
                if mask is not None:
                    scores = scores.masked_fill(~mask[:, at : at + TILE], float("-inf"))
                top = torch.maximum(best, scores.amax(-1, keepdim=True))
                weights, fade = (scores - top).exp(), (best - top).exp()
                total = total * fade + weights.sum(-1, keepdim=True)
                kept = kept * fade + weights @ v[:, at : at + TILE]
                best = top
            out[rows] = (kept / total).transpose(0, 1)
        return out

    for layer in inner.layers:
        layer.attention = attend
    return inner
