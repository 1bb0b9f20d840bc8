"""Keeps 96 MiB of its weights in another layout and says so."""

from base import build as honest_build

PACKING = 101_000_000
KEPT_BYTES = 96 << 20


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        copies = KEPT_BYTES // len(inner.layers) // layer.o_proj.nbytes
        layer.packed = layer.o_proj.t().repeat(copies, 1, 1).contiguous()
        layer.o_proj = layer.packed[0].t()
    return inner
