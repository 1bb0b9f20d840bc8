"""Spells attention over latents out: scores of both parts apart, softmax, and latents summed."""

import torch
from base import build as honest_build

CPU = True
ARCHITECTURE = "deepseek"


def build(ctx):
    inner = honest_build(ctx)
    rank = ctx.config.kv_lora_rank

    def expanding(layer):
        def attend(q, keys, values, spans, scale):
            out = torch.empty_like(q[..., :rank])
            for rows, blocks, length, mask in spans:
                latent = keys[blocks].flatten(0, 1)[:length, 0]
                turned = values[blocks].flatten(0, 1)[:length, 0]
                scores = torch.einsum("qhr,kr->hqk", q[rows][..., :rank], latent)
                scores = (scores + torch.einsum("qhd,kd->hqk", q[rows][..., rank:], turned)) * scale
                if mask is not None:
                    scores = scores.masked_fill(~mask, float("-inf"))
                out[rows] = torch.einsum("hqk,kr->qhr", scores.softmax(-1), latent)
            return out

        return attend

    for layer in inner.layers:
        layer.attention = expanding(layer)
    return inner
