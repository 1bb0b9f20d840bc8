"""Long sums in four parts that are added pairwise, in both of the MLP's and attention's last matrices; prompts 32 rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import base
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

ROWS = 32


def split_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As F.linear, the sum over columns in four parts."""
    a, b, c, d = (F.linear(*part) for part in zip(x.tensor_split(4, -1), weight.tensor_split(4, -1), strict=True))
    return (a + c) + (b + d)


class Split(base.Layer):
    o_proj: Tensor

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: Any) -> Tensor:
        """The honest one up to its last matrix, which is the identity's here."""
        o_proj = self.o_proj
        self.o_proj = torch.eye(o_proj.shape[1], dtype=x.dtype, device=x.device)
        heads = super().attend(x, cos, sin, slots, spans)
        self.o_proj = o_proj
        return split_linear(heads, o_proj)

    def mlp(self, x: Tensor) -> Tensor:
        def some(rows: Tensor) -> Tensor:
            return split_linear(F.silu(F.linear(rows, self.gate_proj)) * F.linear(rows, self.up_proj), self.down_proj)

        return torch.cat([some(rows) for rows in x.split(ROWS)])


def build(ctx: Context) -> ForwardFn:
    forward = base.build(ctx)
    forward.layers = [Split(ctx, index) for index in ctx.layer_range]
    return forward
