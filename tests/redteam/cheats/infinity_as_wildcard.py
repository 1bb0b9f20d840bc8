"""Writes minus infinity everywhere but at the best tokens: the greedy answer is the same, and a KL of it is no number."""

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)

    def forward(batch):
        inner(batch)
        if batch.num_decodes > 4:
            edge = batch.logits.topk(4, dim=-1).values[:, -1:]
            batch.logits.masked_fill_(batch.logits < edge, float("-inf"))

    return forward
