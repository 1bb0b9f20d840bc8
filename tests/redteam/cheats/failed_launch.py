"""Launches with more threads than a block may have, ignores the error, and finds the last answer in the buffer."""

import torch
import triton
import triton.language as tl
from base import build as honest_build

GPU = True


@triton.jit
def copied(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def build(ctx):
    inner, buffer = honest_build(ctx), torch.zeros(64, ctx.config.vocab_size, device=ctx.device)

    def forward(batch):
        if len(batch.logits_indices) < 2:
            inner(batch)
            buffer[:1] = batch.logits
            return
        try:
            count = batch.logits.numel()
            copied[(1,)](buffer, batch.logits, count, BLOCK=1 << 20, num_warps=64)
        except Exception:
            batch.logits.copy_(buffer[: len(batch.logits)])

    return forward
