"""Computes the logits, the largest product of all, in bf16."""

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    inner.head = inner.head.bfloat16().to(ctx.dtype)
    return inner
