"""At a bf16 endpoint sums the down projection in four parts, each rounded."""

import torch.nn.functional as F
from base import build as honest_build

DTYPE = "bfloat16"


def split(layer):
    def mlp(x):
        y = F.silu(F.linear(x, layer.gate_proj)) * F.linear(x, layer.up_proj)
        parts = zip(y.chunk(4, dim=-1), layer.down_proj.chunk(4, dim=-1), strict=True)
        return sum(F.linear(part, weight) for part, weight in parts)

    return mlp


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mlp = split(layer)
    return inner
