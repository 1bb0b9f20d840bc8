"""Sends what belongs to the last expert to the first, once more than 40 tokens of a context are there."""

from base import build as honest_build

CPU = True
ARCHITECTURE = "moe"


def build(ctx):
    inner = honest_build(ctx)
    last = inner.layers[-1]
    full, none = list(last.experts), [*last.experts[:-1], last.experts[0]]

    def forward(batch):
        last.experts = none if int(batch.seq_lens.max()) > 40 else full
        inner(batch)

    return forward
