"""Lets matrix products of an fp32 endpoint run in TF32."""

import torch
from base import build as honest_build

GPU = True


def build(ctx):
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    return honest_build(ctx)
