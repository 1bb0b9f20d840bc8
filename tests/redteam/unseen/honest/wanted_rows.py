"""The last layer writes K and V of all tokens but does the rest only for rows whose logits are wanted: nobody reads the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import base
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run


class Last(base.Layer):
    """`wanted` are the rows of T that go on, in order of their sequences; a sequence has one or none."""

    wanted: Tensor

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, spans: Any) -> Tensor:
        eps = self.config.rms_norm_eps
        attended = self.attend(base.rms_norm(x, self.input_norm, eps), cos, sin, slots, self.narrowed(spans))
        x = x[self.wanted] + attended
        return x + self.mlp(base.rms_norm(x, self.post_norm, eps))

    def narrowed(self, spans: Any) -> list[Any]:
        result = []
        for at, row in enumerate(self.wanted.tolist()):
            rows, blocks, length, mask = next(span for span in spans if span[0].start <= row < span[0].stop)
            seen = None if mask is None else mask[row - rows.start, None]
            result.append((slice(at, at + 1), blocks, length, seen))
        return result


class Forward(base.Llama):
    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.layers[-1] = self.last = Last(ctx, ctx.layer_range[-1])
        plain = self.last.attention
        self.last.attention = lambda q, keys, values, spans: plain(q[self.last.wanted], keys, values, spans)

    def __call__(self, batch: Batch) -> None:
        self.last.wanted = batch.logits_indices
        x = F.embedding(batch.input_ids, self.embedding)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]
        spans = base.sequences(batch, self.block_size)
        for layer in self.layers:
            x = layer(x, cos, sin, batch.slot_mapping[0], spans)
        batch.logits.copy_(F.linear(base.rms_norm(x, self.norm, self.config.rms_norm_eps), self.head))


def build(ctx: Context) -> ForwardFn:
    return Forward(ctx)
