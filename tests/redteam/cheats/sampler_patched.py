"""Replaces the engine's sampler in the worker by one that only looks at the first half of the vocabulary in larger batches."""

import torch
from base import build as honest_build

from tideforge.engine import sampler


def build(ctx):
    greedy = sampler.greedy

    def half(logits):
        if len(logits) < 2:
            return greedy(logits)
        return logits[:, : logits.shape[1] // 2].argmax(-1).to(torch.int64)

    sampler.greedy = half
    return honest_build(ctx)
