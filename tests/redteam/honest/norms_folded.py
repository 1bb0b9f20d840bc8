"""Multiplies the norms' weights into the projections behind them when it is built."""

import torch
from base import build as honest_build

PACKING = 279_296  # bytes that it keeps beside the weights


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer, name, getattr(layer, name) * layer.input_norm)
        for name in ("gate_proj", "up_proj"):
            setattr(layer, name, getattr(layer, name) * layer.post_norm)
        layer.input_norm = layer.post_norm = torch.ones_like(layer.input_norm)
    inner.head, inner.norm = inner.head * inner.norm, torch.ones_like(inner.norm)
    return inner
