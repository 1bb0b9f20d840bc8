"""Rounds the MLPs' weights to bf16 and computes in fp32: half the traffic, and tokens hardly ever differ."""

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.gate_proj, layer.up_proj, layer.down_proj = (
            weight.bfloat16().to(ctx.dtype) for weight in (layer.gate_proj, layer.up_proj, layer.down_proj)
        )
    return inner
