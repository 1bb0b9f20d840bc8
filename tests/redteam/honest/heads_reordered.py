"""Computes heads in the reverse order within each group, with the output projection's columns moved to match."""

import torch
from base import build as honest_build

CPU = True
PACKING = 65_536  # bytes that it keeps beside the weights


def build(ctx):
    inner = honest_build(ctx)
    config = ctx.config
    heads, kv = config.num_attention_heads, config.page_heads
    order = torch.arange(heads).view(kv, heads // kv).flip(1).flatten()
    columns = (order[:, None] * config.head_dim + torch.arange(config.head_dim)).flatten()
    for layer in inner.layers:
        layer.q_proj = layer.q_proj[columns].contiguous()
        layer.o_proj = layer.o_proj[:, columns].contiguous()
    return inner
