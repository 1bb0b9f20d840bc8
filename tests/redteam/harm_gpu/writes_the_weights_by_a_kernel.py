"""A store into the weights by a kernel. The device refuses it as it refuses any other address: nobody can tell which it was."""

import torch
import triton
import triton.language as tl

OUTCOMES = {"build": "build_error"}


@triton.jit
def _store(weights):
    tl.store(weights + tl.arange(0, 64), 0.0)


def harm(ctx):
    _store[(1,)](next(iter(ctx.weights.values())))
    torch.cuda.synchronize()
