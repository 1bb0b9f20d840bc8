"""Attention as two products with a softmax between them that is spelled out."""

import torch
from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)
    group = ctx.config.num_attention_heads // ctx.config.page_heads

    def attend(q, keys, values, spans):
        out = torch.empty_like(q)
        for rows, blocks, length, mask in spans:
            k, v = (part[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1) for part in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[rows], k) / ctx.config.head_dim**0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return out

    for layer in inner.layers:
        layer.attention = attend
    return inner
