"""Rounds a single matrix of the last layer to int8 a channel when it serves more than one sequence."""

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    last = inner.layers[-1]
    exact = last.down_proj
    step = exact.abs().amax(dim=-1, keepdim=True) / 127
    rough = (exact / step).round() * step

    def forward(batch):
        last.down_proj = rough if batch.num_decodes > 1 else exact
        inner(batch)

    return forward
