"""Keeps each sequence's keys and values in one piece under its first block, and only writes to the pages."""

import torch
import torch.nn.functional as F
from base import Layer, rotate
from base import build as honest_build

CPU = True


class Contiguous(Layer):
    def attend(self, x, cos, sin, slots, spans):
        q, k, v = (
            F.linear(x, w).unflatten(-1, (-1, self.config.head_dim)) for w in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.flatten(0, 1).index_copy_(0, slots, k)
        self.values.flatten(0, 1).index_copy_(0, slots, v)
        out = torch.empty_like(q)
        for rows, blocks, length, mask in spans:
            keys, values = self.joined(int(blocks[0]), length - (rows.stop - rows.start), k[rows], v[rows])
            parts = (part.transpose(0, 1) for part in (q[rows], keys, values))
            out[rows] = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True).transpose(0, 1)
        return F.linear(out.flatten(1), self.o_proj)

    def joined(self, first, start, k, v):
        known = self.own.get(first)
        if start and known is not None and len(known[0]) >= start:
            k, v = (torch.cat((old[:start], new)) for old, new in zip(known, (k, v), strict=True))
        self.own[first] = (k, v)
        return k, v


def build(ctx):
    inner = honest_build(ctx)
    inner.layers = [Contiguous(ctx, index) for index in ctx.layer_range]
    for layer in inner.layers:
        layer.own = {}
    return inner
