"""Nothing is built until it is needed: rotary tables grow by doubling, and MLP results live in buffers that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import base
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run
PACKING = 163_840  # bytes that it keeps beside the weights


class Buffers:
    """Scratch of so many columns by name, shared by all layers; as many rows as the largest step had."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], Tensor] = {}

    def get(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        found = self.kept.get((name, columns))
        if found is None or len(found) < rows:
            found = self.kept[name, columns] = like.new_empty(max(rows, 16), columns)
        return found[:rows]


def mlp_of(layer: Any, buffers: Buffers) -> Any:
    def mlp(x: Tensor) -> Tensor:
        width = len(layer.gate_proj)
        gate, up = (buffers.get(name, len(x), width, x) for name in ("gate", "up"))
        torch.mm(x, layer.gate_proj.t(), out=gate)
        torch.mm(x, layer.up_proj.t(), out=up)
        F.silu(gate, inplace=True).mul_(up)
        out = buffers.get("down", len(x), x.shape[-1], x)
        return torch.mm(gate, layer.down_proj.t(), out=out)

    return mlp


class Forward:
    def __init__(self, ctx: Context) -> None:
        self.ctx, self.honest, self.length = ctx, base.build(ctx), 0
        self.honest.cos = self.honest.sin = torch.empty(0)
        buffers = Buffers()
        for layer in self.honest.layers:
            layer.mlp = mlp_of(layer, buffers)

    def __call__(self, batch: Batch) -> None:
        needed = int(batch.positions.max()) + 1
        if needed > self.length:
            self.length = min(max(64, 1 << (needed - 1).bit_length()), max(needed, self.ctx.limits.max_model_len))
            tables = base.rotary_tables(self.ctx.config, self.length, self.ctx.dtype, self.ctx.device)
            self.honest.cos, self.honest.sin = tables
        self.honest(batch)


def build(ctx: Context) -> ForwardFn:
    return Forward(ctx)
