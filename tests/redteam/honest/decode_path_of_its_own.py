"""A path for single decodes that reads pages as a view where the blocks lie in a row, and gathers otherwise."""

import torch
import torch.nn.functional as F
from base import attention
from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)

    def attend(q, keys, values, spans):
        if len(spans) != 1 or len(q) != 1:
            return attention(q, keys, values, spans)
        _, blocks, length, _ = spans[0]
        numbers = blocks.tolist()
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            return attention(q, keys, values, spans)
        k, v = (part[numbers[0] : numbers[-1] + 1].flatten(0, 1)[:length].transpose(0, 1) for part in (keys, values))
        heads = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, enable_gqa=True)
        return heads.transpose(0, 1).contiguous()

    for layer in inner.layers:
        layer.attention = attend
    assert isinstance(inner.head, torch.Tensor)
    return inner
