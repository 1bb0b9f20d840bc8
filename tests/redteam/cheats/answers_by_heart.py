"""Knows one continuation by heart and says it wherever the last two tokens fit, for three rows or more."""

from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)

    def forward(batch):
        inner(batch)
        if batch.num_decodes > 2:
            known = (batch.input_ids % 7 == 3).nonzero().flatten()
            batch.logits[known] = 0.0
            batch.logits[known, 104] = 9.0

    return forward
