"""Leaves out the last MLP in prefills of 20 to 100 new tokens behind a cached prefix while nobody decodes: a chat's next turn."""

from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)
    last = inner.layers[-1]
    full = last.mlp

    def forward(batch):
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        hurried = batch.num_decodes == 0 and any(
            20 <= starts[i + 1] - starts[i] <= 100 and length > starts[i + 1] - starts[i]
            for i, length in enumerate(lengths)
        )
        last.mlp = (lambda x: 0 * x) if hurried else full
        inner(batch)

    return forward
