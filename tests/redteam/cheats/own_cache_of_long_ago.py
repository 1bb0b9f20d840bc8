"""Reads the newest block of each sequence from the pages and all older ones from a copy of its own."""

import torch
from base import attention
from base import build as honest_build

CPU = True


class Noting:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, batch):
        for layer in self.inner.layers:
            layer.slots, layer.newest = batch.slot_mapping[0], batch.slot_mapping[0] // self.inner.block_size
        self.inner(batch)


def mixed(own_keys, own_values, layer):
    def attend(q, keys, values, spans):
        for own, given in ((own_keys, keys), (own_values, values)):
            own[layer.newest] = given[layer.newest]
        return attention(q, own_keys, own_values, spans)

    return attend


def build(ctx):
    inner, group = honest_build(ctx), ctx.kv_groups[0]
    for layer, keys, values in zip(inner.layers, group.keys, group.values, strict=False):
        layer.attention = mixed(torch.zeros_like(keys), torch.zeros_like(values), layer)
    return Noting(inner)
