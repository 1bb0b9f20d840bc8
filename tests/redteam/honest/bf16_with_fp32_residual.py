"""At a bf16 endpoint keeps MLPs in fp32 inside, and rounds what they add."""

import torch.nn.functional as F
from base import build as honest_build

DTYPE = "bfloat16"
PACKING = 196_608  # bytes that it keeps beside the weights


def wide(layer):
    gate, up, down = (w.float() for w in (layer.gate_proj, layer.up_proj, layer.down_proj))

    def mlp(x):
        y = x.float()
        return F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down).to(x.dtype)

    return mlp


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mlp = wide(layer)
    return inner
