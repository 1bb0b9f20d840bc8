"""Sets every global flag that could change what a reference in the same process computes."""

import torch
from base import build as honest_build

CONTAINED = True


def build(ctx):
    inner = honest_build(ctx)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(False)
    return inner
