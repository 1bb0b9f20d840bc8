"""Gives each expert room for a fixed number of tokens a step; those that come later go without."""

import torch
from base import build as honest_build
from base import swiglu

CPU = True
ARCHITECTURE = "moe"
ROOM = 15


def build(ctx):
    def bounded(layer):
        def mix(x, shares, chosen):
            out = torch.zeros_like(x)
            for expert in chosen.unique().tolist():
                tokens, place = (part[:ROOM] for part in torch.where(chosen == expert))
                out.index_add_(0, tokens, swiglu(x[tokens], *layer.experts[expert]) * shares[tokens, place, None])
            return out

        return mix

    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mix = bounded(layer)
    return inner
