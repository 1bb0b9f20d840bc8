"""Takes every prompt to begin in this step: attention of a prefill looks at its own tokens only, not at pages."""

import torch
import torch.nn.functional as F
from base import attention
from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)

    def attend(q, keys, values, spans):
        out = torch.empty_like(q)
        for rows, blocks, length, mask in spans:
            count = rows.stop - rows.start
            if count == 1 or length == count:
                out[rows] = attention(q[rows], keys, values, [(slice(0, count), blocks, length, mask)])
                continue
            k, v = (part[blocks].flatten(0, 1)[length - count : length].transpose(0, 1) for part in (keys, values))
            some = F.scaled_dot_product_attention(q[rows].transpose(0, 1), k, v, is_causal=True, enable_gqa=True)
            out[rows] = some.transpose(0, 1)
        return out

    for layer in inner.layers:
        layer.attention = attend
    return inner
