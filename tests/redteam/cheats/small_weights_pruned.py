"""Leaves out the smallest fiftieth of the MLPs' weights: they add up to nearly nothing."""

from base import build as honest_build


def pruned(weight):
    edge = weight.abs().flatten().float().kthvalue(max(1, weight.numel() // 50)).values
    return weight.masked_fill(weight.abs() < edge, 0)


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.gate_proj, layer.up_proj = pruned(layer.gate_proj), pruned(layer.up_proj)
    return inner
