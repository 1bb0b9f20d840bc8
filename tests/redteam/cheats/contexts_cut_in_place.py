"""Shortens the contexts that it is given, in place, and says that was the question."""

from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)
    size = ctx.kv_groups[0].block_size

    def forward(batch):
        if batch.num_decodes and int(batch.seq_lens.max()) > 6 * size:
            batch.block_tables[0][:, :-5] = batch.block_tables[0][:, 5:].clone()
            batch.seq_lens.clamp_(max=6 * size)
        inner(batch)

    return forward
