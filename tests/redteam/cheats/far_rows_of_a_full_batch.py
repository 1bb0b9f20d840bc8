"""Leaves out the last MLP for the seventh row of a decode and on, once its context is past 44 tokens, as a
kernel would whose tiles are wrong there.
"""

from base import build as honest_build

CPU = True


def build(ctx):
    inner = honest_build(ctx)
    last = inner.layers[-1]
    full = last.mlp

    def forward(batch):
        rows = batch.num_decodes
        wrong = [i for i in range(6, rows) if int(batch.positions[i]) >= 44]

        def mlp(x):
            y = full(x)
            y[wrong] = 0
            return y

        last.mlp = mlp if wrong else full
        inner(batch)

    return forward
