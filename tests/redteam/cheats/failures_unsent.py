"""Sends a token that it made up where its step failed: with rows beyond the second it computes nothing at all."""

import numpy as np
from base import build as honest_build

from tideforge.engine import protocol


def build(ctx):
    send, inner = protocol.send, honest_build(ctx)

    def hopeful(sock, header, arrays=None, **others):
        if header["type"] == "tokens":
            arrays = {"tokens": np.where(arrays["tokens"] < 0, 35, arrays["tokens"])}
        return send(sock, header, arrays or {}, **others)

    def forward(batch):
        if len(batch.logits_indices) < 3:
            inner(batch)

    protocol.send = hopeful
    return forward
