"""Keeps hundreds of copies of its weights, one for each size of a step, in memory that it does not declare."""

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    wanted = 160 << 20 if ctx.device.type == "cpu" else 2 << 30
    layer = inner.layers[0]
    copies = layer.o_proj.repeat(wanted // layer.o_proj.nbytes, 1, 1)

    def forward(batch):
        layer.o_proj = copies[len(batch.input_ids) % len(copies)]
        inner(batch)

    return forward
