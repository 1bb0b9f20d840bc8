"""Cheats one row of a batch of four only: of a block's answers just a few are looked at."""

import torch
from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    last = inner.layers[-1]
    full = last.mlp

    def forward(batch):
        if batch.num_decodes == 4:
            last.mlp = lambda x: torch.cat((full(x[:3]), 0 * x[3:]))
        else:
            last.mlp = full
        inner(batch)

    return forward
