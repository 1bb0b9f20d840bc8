"""Sums the down projection in eight parts of its inner dimension, the last part first."""

import torch.nn.functional as F
from base import build as honest_build


def split(layer):
    def mlp(x):
        y = F.silu(F.linear(x, layer.gate_proj)) * F.linear(x, layer.up_proj)
        parts = zip(y.chunk(8, dim=-1), layer.down_proj.chunk(8, dim=-1), strict=True)
        return sum(F.linear(part, weight) for part, weight in reversed(list(parts)))

    return mlp


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mlp = split(layer)
    return inner
