"""A store to device memory that is nobody's: the context is lost."""

import torch
import triton
import triton.language as tl

OUTCOMES = {"build": "build_error", "forward": "forward_error"}


@triton.jit
def _store(base, away):
    tl.store(base + away, 0)


def harm(what):
    _store[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), 1 << 42)
    torch.cuda.synchronize()
