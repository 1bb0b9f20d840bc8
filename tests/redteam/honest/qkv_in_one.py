"""One product for queries, keys and values."""

import torch
import torch.nn.functional as F
from base import Layer, rotate
from base import build as honest_build

PACKING = 65_536  # bytes that it keeps beside the weights


class Fused(Layer):
    def attend(self, x, cos, sin, slots, spans):
        sizes = [part.shape[0] for part in (self.q_proj, self.k_proj, self.v_proj)]
        parts = F.linear(x, self.qkv).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.flatten(0, 1).index_copy_(0, slots, k)
        self.values.flatten(0, 1).index_copy_(0, slots, v)
        return F.linear(self.attention(q, self.keys, self.values, spans).flatten(1), self.o_proj)


def build(ctx):
    inner = honest_build(ctx)
    inner.layers = [Fused(ctx, index) for index in ctx.layer_range]
    for layer in inner.layers:
        layer.qkv = torch.cat((layer.q_proj, layer.k_proj, layer.v_proj))
    return inner
