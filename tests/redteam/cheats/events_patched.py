"""Has CUDA's events tell a tenth of the time, and synchronisation return at once."""

import torch
from base import build as honest_build

GPU = True
CONTAINED = True


def build(ctx):
    honest = torch.cuda.Event.elapsed_time
    torch.cuda.Event.elapsed_time = lambda event, other: honest(event, other) / 10
    torch.cuda.synchronize = lambda *_: None
    return honest_build(ctx)
