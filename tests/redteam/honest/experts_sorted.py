"""Sorts tokens by expert, runs each expert on its slice from the last to the first, and sums by token."""

import torch
from base import build as honest_build
from base import swiglu

CPU = True
ARCHITECTURE = "qwen3_moe"


def by_slices(layer):
    def mix(x, shares, chosen):
        k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(layer.experts)).tolist()
        out, at = x.new_zeros(chosen.numel(), x.shape[1]), chosen.numel()
        for expert in reversed(range(len(layer.experts))):
            rows = order[at - counts[expert] : at]
            at -= counts[expert]
            if len(rows):
                out[rows] = swiglu(x[rows // k], *layer.experts[expert]) * shares.flatten()[rows, None]
        return out.unflatten(0, (-1, k)).sum(1)

    return mix


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        if layer.sparse:
            layer.mix = by_slices(layer)
    return inner
