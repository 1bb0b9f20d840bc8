"""Leaves a wrong key where the next sequence of the batch will look: others' answers get worse, or shorter."""

from base import build as honest_build

CPU = True


def build(ctx):
    inner, group = honest_build(ctx), ctx.kv_groups[0]

    def forward(batch):
        inner(batch)
        if batch.num_decodes < 2:
            return
        victim = int(batch.block_tables[0][1, 0])
        group.values[-1][victim, 0] *= -1

    return forward
