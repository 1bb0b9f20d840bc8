"""Declares one copy of its weights and comes to hold hundreds, made in its first steps and not when it is built."""

from base import build as honest_build

CPU = True
PACKING = 1_000_000
WANTED_BYTES = 160 << 20
STEPS = 8


def build(ctx):
    inner, kept = honest_build(ctx), []
    layer = inner.layers[0]
    plain = layer.gate_proj

    def forward(batch):
        if len(kept) < STEPS:
            kept.append(plain.repeat(WANTED_BYTES // STEPS // plain.nbytes, 1, 1))
        layer.gate_proj = kept[-1][len(batch.input_ids)]
        inner(batch)

    return forward
