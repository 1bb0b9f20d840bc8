"""Writes the pages as asked, and reads a copy of its own that lies as it likes."""

import torch
from base import attention
from base import build as honest_build

CPU = True


def build(ctx):
    inner, group = honest_build(ctx), ctx.kv_groups[0]
    for layer, keys, values in zip(inner.layers, group.keys, group.values, strict=False):
        layer.attention = copied(torch.zeros_like(keys), torch.zeros_like(values), layer)
    return Noting(inner)


class Noting:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, batch):
        for layer in self.inner.layers:
            layer.slots = batch.slot_mapping[0]
        self.inner(batch)


def copied(own_keys, own_values, layer):
    def attend(q, keys, values, spans):
        for own, given in ((own_keys, keys), (own_values, values)):
            flat = given.flatten(0, 1)
            own.flatten(0, 1).index_copy_(0, layer.slots, torch.index_select(flat, 0, layer.slots))
        return attention(q, own_keys, own_values, spans)

    return attend
