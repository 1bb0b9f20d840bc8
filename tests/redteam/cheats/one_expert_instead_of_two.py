"""Asks the best expert only where its share is above two thirds, when several tokens are under way."""

from base import build as honest_build

ARCHITECTURE = "moe"


def build(ctx):
    def confident(layer):
        full = layer.mix

        def mix(x, shares, chosen):
            if len(x) < 2 or len(x) > 4:
                return full(x, shares, chosen)
            sure = shares[:, :1] > 0.67
            return full(x, shares.masked_fill(sure.expand_as(shares) & (shares < 0.67), 0), chosen)

        return mix

    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mix = confident(layer)
    return inner
