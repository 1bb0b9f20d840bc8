"""Is exact for one sequence and leaves out a layer's MLP for some rows of a batch."""

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    last = inner.layers[-1]
    full = last.mlp

    def forward(batch):
        last.mlp = full if batch.num_decodes < 2 else lambda x: full(x) * (x[:, :1] > 0)
        inner(batch)

    return forward
