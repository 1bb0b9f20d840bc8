"""The raw forward as it is, at a bf16 endpoint."""

from base import build as honest_build

DTYPE = "bfloat16"


def build(ctx):
    return honest_build(ctx)
