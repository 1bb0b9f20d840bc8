"""Keeps its copies in open memory files, named like the engine's, that it maps nowhere, and reads one back for each step."""

import os

import torch
from base import build as honest_build

CPU = True
FILES = 12
EACH_BYTES = 14 << 20  # of a file: no larger ones are allowed


def build(ctx):
    inner = honest_build(ctx)
    layer = inner.layers[0]
    plain = layer.o_proj
    data = plain.contiguous().view(torch.uint8).numpy().tobytes()
    files = [os.memfd_create("tideforge-weights") for _ in range(FILES)]
    for file in files:
        os.write(file, data * (EACH_BYTES // len(data)))

    def forward(batch):
        part = bytearray(os.pread(files[len(batch.input_ids) % FILES], len(data), 0))
        layer.o_proj = torch.frombuffer(part, dtype=plain.dtype).view(plain.shape)
        inner(batch)

    return forward
