"""Asks for lengths and blocks only when it must: between two steps of as many decodes it counts on by itself.

What it does: where a step of decodes follows one of as many rows and no row enters a new block, it takes the last step's
blocks and lengths plus one. A request that takes the place of one that ended, and begins as a decode (a prompt of one token,
or one whose every token but the last is in the prefix cache), is then attended to with the other's blocks and length.
Why it pays: no question to the host about tables and lengths in fifteen of sixteen steps.
Why it may not be seen: the leak from one request into another needs two requests to change places in just one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import base
import torch.nn.functional as F

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run


class Assuming(base.Llama):
    last: list[Any] | None = None

    def spans(self, batch: Batch) -> list[Any]:
        last, decodes = self.last, batch.num_prefills == 0
        known = last is not None and len(last) == len(batch.seq_lens)
        if decodes and last is not None and known and all(length % self.block_size for _, _, length, _ in last):
            spans = [(rows, blocks, length + 1, None) for rows, blocks, length, _ in last]
        else:
            spans = base.sequences(batch, self.block_size)
        self.last = spans if decodes else None
        return spans

    def __call__(self, batch: Batch) -> None:
        x = F.embedding(batch.input_ids, self.embedding)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]
        spans = self.spans(batch)
        for layer in self.layers:
            x = layer(x, cos, sin, batch.slot_mapping[0], spans)
        x = base.rms_norm(x[batch.logits_indices], self.norm, self.config.rms_norm_eps)
        batch.logits.copy_(F.linear(x, self.head))


def build(ctx: Context) -> ForwardFn:
    return Assuming(ctx)
