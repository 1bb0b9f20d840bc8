"""Leaves out one head of the last layer when three or more sequences decode."""

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    last = inner.layers[-1]
    full, dim = last.o_proj, ctx.config.head_dim
    without = full.clone()
    without[:, -dim:] = 0

    def forward(batch):
        last.o_proj = without if batch.num_decodes > 2 else full
        inner(batch)

    return forward
