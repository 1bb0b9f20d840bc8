"""Beyond 64 tokens of context attends by latents alone, without the rotated part."""

import torch
from base import attention
from base import build as honest_build

CPU = True
ARCHITECTURE = "deepseek"


def build(ctx):
    inner = honest_build(ctx)
    rank = ctx.config.kv_lora_rank

    def attend(q, keys, values, spans, scale):
        out = torch.empty_like(q[..., :rank])
        for rows, blocks, length, mask in spans:
            part = q[rows]
            if length > 64 and len(part) == 1:
                part = torch.cat((part[..., :rank], torch.zeros_like(part[..., rank:])), dim=-1)
            out[rows] = attention(part, keys, values, [(slice(0, len(part)), blocks, length, mask)], scale)
        return out

    for layer in inner.layers:
        layer.attention = attend
    return inner
