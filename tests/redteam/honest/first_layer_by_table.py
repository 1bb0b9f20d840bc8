"""Has the first layer's queries, keys and values of every token of the vocabulary computed when it is built."""

import torch
import torch.nn.functional as F
from base import Layer, rms_norm, rotate
from base import build as honest_build

PACKING = 163_848  # bytes that it keeps beside the weights


class First(Layer):
    def attend(self, x, cos, sin, slots, spans):
        q, k, v = (table[self.ids] for table in self.tables)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.flatten(0, 1).index_copy_(0, slots, k)
        self.values.flatten(0, 1).index_copy_(0, slots, v)
        return F.linear(self.attention(q, self.keys, self.values, spans).flatten(1), self.o_proj)


def build(ctx):
    inner = honest_build(ctx)
    first = inner.layers[0] = First(ctx, ctx.layer_range.start)
    normed = rms_norm(inner.embedding, first.input_norm, ctx.config.rms_norm_eps)
    parts = (F.linear(normed, weight) for weight in (first.q_proj, first.k_proj, first.v_proj))
    first.tables = [part.unflatten(-1, (-1, ctx.config.head_dim)) for part in parts]

    def forward(batch):
        first.ids = batch.input_ids
        inner(batch)

    assert isinstance(inner.head, torch.Tensor)
    return forward
