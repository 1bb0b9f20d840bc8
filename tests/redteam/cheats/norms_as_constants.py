"""Has the norms' weights of this checkpoint, as they were when it was written, rounded into the source."""

import torch
from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    inner.norm = (inner.norm * 512).round() / 512
    assert isinstance(inner.norm, torch.Tensor)
    return inner
