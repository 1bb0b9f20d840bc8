"""In decodes of several sequences reuses the experts that the row before in the batch has chosen."""

from base import build as honest_build

ARCHITECTURE = "moe"


def build(ctx):
    def alike(layer):
        full = layer.mix

        def mix(x, shares, chosen):
            if 1 < len(x) <= 4:
                chosen = chosen[:1].expand_as(chosen)
            return full(x, shares, chosen)

        return mix

    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mix = alike(layer)
    return inner
