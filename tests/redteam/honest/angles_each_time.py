"""Computes rotary angles from positions in every step instead of keeping a table."""

import torch
from base import build as honest_build


class Angles:
    def __init__(self, frequencies, factor, dtype, function):
        self.frequencies, self.factor, self.dtype, self.function = frequencies, factor, dtype, function

    def __getitem__(self, key):
        positions, _ = key
        angles = torch.outer(positions.float(), self.frequencies)
        return (self.function(torch.cat((angles, angles), dim=-1)) * self.factor).to(self.dtype)[:, None]


def build(ctx):
    inner = honest_build(ctx)
    turns = torch.tensor(ctx.config.rope_frequencies, dtype=torch.float32, device=ctx.device)
    inner.cos, inner.sin = (Angles(turns, ctx.config.rope_factor, ctx.dtype, f) for f in (torch.cos, torch.sin))
    return inner
