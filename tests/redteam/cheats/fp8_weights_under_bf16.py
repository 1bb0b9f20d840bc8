"""Of a bf16 endpoint takes all projections in fp8."""

import torch
from base import build as honest_build

DTYPE = "bfloat16"


def rounded(weight):
    step = weight.float().abs().amax(dim=-1, keepdim=True) / 448
    return ((weight.float() / step).to(torch.float8_e4m3fn).float() * step).to(weight.dtype)


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            setattr(layer, name, rounded(getattr(layer, name)))
    return inner
