"""Goes on writing to the blocks of sequences that have ended, where it keeps its notes about them."""

from base import build as honest_build

CPU = True


def build(ctx):
    inner, group = honest_build(ctx), ctx.kv_groups[0]
    before = []

    def forward(batch):
        mine = set(batch.block_tables[0].flatten().tolist())
        for block in [block for block in before if block not in mine][:1]:
            group.keys[0][block, -1] = 0
        inner(batch)
        before[:] = sorted(mine - {0})

    return forward
