"""Queries, keys and values by one matrix, gate and up by another: packed once when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import base
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

PACKING = 196_608  # bytes that it keeps beside the weights


class Packed(base.Layer):
    def __init__(self, ctx: Context, index: int) -> None:
        super().__init__(ctx, index)
        self.sizes = [len(self.q_proj), len(self.k_proj), len(self.v_proj)]
        self.qkv = torch.cat((self.q_proj, self.k_proj, self.v_proj))
        self.bias = torch.cat(self.biases) if self.config.qkv_bias else None
        self.gate_up = torch.cat((self.gate_proj, self.up_proj))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: Any) -> Tensor:
        parts = F.linear(x, self.qkv, self.bias).split(self.sizes, dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.config.head_dim)) for y in parts)
        if self.config.qk_norm:
            eps = self.config.rms_norm_eps
            q, k = base.rms_norm(q, self.q_norm, eps), base.rms_norm(k, self.k_norm, eps)
        q, k = base.rotate(q, cos, sin), base.rotate(k, cos, sin)
        self.keys.flatten(0, 1)[slots] = k
        self.values.flatten(0, 1)[slots] = v
        return F.linear(self.attention(q, self.keys, self.values, spans).flatten(1), self.o_proj)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj)


def build(ctx: Context) -> ForwardFn:
    forward = base.build(ctx)
    forward.layers = [Packed(ctx, index) for index in ctx.layer_range]
    return forward
