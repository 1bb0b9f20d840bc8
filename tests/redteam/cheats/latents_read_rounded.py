"""Writes exact latents and reads them in half the bytes."""

from base import attention
from base import build as honest_build

CPU = True
ARCHITECTURE = "deepseek"


def build(ctx):
    inner = honest_build(ctx)

    def attend(q, keys, values, spans, scale):
        return attention(q, keys.bfloat16().to(q.dtype), values, spans, scale)

    for layer in inner.layers:
        layer.attention = attend
    return inner
