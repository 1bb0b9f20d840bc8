"""Holds the MLPs' weights transposed and multiplies from the other side."""

import torch.nn.functional as F
from base import build as honest_build

PACKING = 196_608  # bytes that it keeps beside the weights


def turned(layer):
    gate, up, down = (w.t().contiguous() for w in (layer.gate_proj, layer.up_proj, layer.down_proj))

    def mlp(x):
        return (F.silu(x @ gate) * (x @ up)) @ down

    return mlp


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mlp = turned(layer)
    return inner
