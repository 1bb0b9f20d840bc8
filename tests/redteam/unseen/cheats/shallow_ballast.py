"""Slow where that helps: the fewer layers it is built with, the more it computes for nothing.

What it does: for each layer that the model has and this build has not, it runs the first layer's MLP once more on the
embeddings and drops the result. Built whole it does nothing of the kind.
Why it pays: the few-layer tier takes the difference of two depths for the time of a layer. Ballast on the shallow depth
makes that difference smaller: layers seem to cost nearly nothing, although nothing became faster.
Why it may not be seen: all outputs are right at every depth, and the whole model runs at its honest speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from base import build as honest_build

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn


CONTAINED = True  # whole, as it is verified, it must gain nothing


class Ballasted:
    def __init__(self, ctx: Context) -> None:
        self.forward = honest_build(ctx)
        self.missing = ctx.config.num_hidden_layers - len(ctx.layer_range)

    def __call__(self, batch: Batch) -> None:
        x = F.embedding(batch.input_ids, self.forward.embedding)
        for _ in range(self.missing):
            self.forward.layers[0].mlp(x)
        self.forward(batch)


def build(ctx: Context) -> ForwardFn:
    return Ballasted(ctx)
