"""Writes products into buffers that it has allocated once."""

import torch
import torch.nn.functional as F
from base import build as honest_build

PACKING = 327_680  # bytes that it keeps beside the weights


def buffered(layer, rows):
    gate = torch.empty(rows, layer.gate_proj.shape[0], dtype=layer.gate_proj.dtype, device=layer.gate_proj.device)
    up = torch.empty_like(gate)
    out = torch.empty(rows, layer.down_proj.shape[0], dtype=gate.dtype, device=gate.device)

    def mlp(x):
        n = len(x)
        torch.mm(x, layer.gate_proj.t(), out=gate[:n])
        torch.mm(x, layer.up_proj.t(), out=up[:n])
        F.silu(gate[:n], inplace=True)
        return torch.mm(gate[:n].mul_(up[:n]), layer.down_proj.t(), out=out[:n])

    return mlp


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mlp = buffered(layer, ctx.limits.max_num_batched_tokens)
    return inner
