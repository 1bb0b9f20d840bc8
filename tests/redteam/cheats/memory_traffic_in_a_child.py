"""Has a child stream memory all the time and is paused itself while it computes."""

import os
import signal

import torch
from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    child = os.fork()
    if child == 0:
        a = bytearray(8 << 20)
        while os.getppid() != 1:
            a[:] = a[::-1]
        os._exit(0)

    def forward(batch):
        os.kill(child, signal.SIGSTOP)
        inner(batch)
        os.kill(child, signal.SIGCONT)

    assert torch.is_tensor(inner.head)
    return forward
