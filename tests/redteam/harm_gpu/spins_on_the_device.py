"""A kernel without an end."""

import torch
import triton
import triton.language as tl

OUTCOMES = {"build": "hung", "forward": "hung"}


@triton.jit
def _forever(flag):
    while tl.atomic_cas(flag, 1, 1) == 0:
        pass


def harm(what):
    _forever[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
