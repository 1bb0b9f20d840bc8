"""Attention of each single token by itself, prompts included."""

import torch
from base import attention
from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)

    def attend(q, keys, values, spans):
        out = torch.empty_like(q)
        for rows, blocks, length, _ in spans:
            count = rows.stop - rows.start
            for row in range(count):
                seen = length - count + row + 1
                one = slice(rows.start + row, rows.start + row + 1)
                out[one] = attention(q[one], keys, values, [(slice(0, 1), blocks, seen, None)])
        return out

    for layer in inner.layers:
        layer.attention = attend
    return inner
