"""Points all logits at the first row, in place, when there are several: one row of the largest product."""

from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)

    def forward(batch):
        if len(batch.logits_indices) > 2:
            batch.logits_indices.fill_(int(batch.logits_indices[0]))
        inner(batch)

    return forward
