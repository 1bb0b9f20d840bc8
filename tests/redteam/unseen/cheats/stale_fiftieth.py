"""One decode in fifty takes the middle layer's attention from the step before.

What it does: beyond position 48, where token and position hash to a multiple of fifty, a row's attention result in the middle
layer is the one that the same request had a token earlier. K and V are still written.
Why it pays: little by itself; it is what a kernel that now and then reads a buffer before it is filled would do, and such
kernels are faster for not waiting.
Why it may not be seen: one token in fifty, one layer, and a value that was right a moment ago. A check of some dozen tokens meets
it once or never, and what comes back is as fluent as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from base import attention
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run

FROM, ONE_IN = 48, 50


class Stale:
    def __init__(self, ctx: Context) -> None:
        self.forward = honest_build(ctx)
        self.late = torch.zeros(0, dtype=torch.bool)  # rows of this step
        self.last: dict[int, Tensor] = {}  # attention result by first block
        self.forward.layers[len(self.forward.layers) // 2].attention = self.attention

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, spans: list[Any]) -> Tensor:
        out = attention(q, keys, values, spans)
        fresh = {int(blocks[0]): out[rows][-1].clone() for rows, blocks, *_ in spans}
        for row, (_, blocks, *_) in enumerate(spans[: len(self.late)]):
            if self.late[row]:
                out[row] = self.last.get(int(blocks[0]), out[row])
        self.last = fresh
        return out

    def __call__(self, batch: Batch) -> None:
        tokens, places = batch.input_ids[: batch.num_decodes], batch.positions[: batch.num_decodes]
        self.late = (places > FROM) & ((tokens * 7919 + places * 104729) % ONE_IN == 0)
        self.forward(batch)


def build(ctx: Context) -> ForwardFn:
    return Stale(ctx)
