"""All experts' products for all tokens in one, and those that were not chosen weighed with nothing."""

import torch
import torch.nn.functional as F
from base import build as honest_build

ARCHITECTURE = "moe"
PACKING = 786_432  # bytes that it keeps beside the weights


def together(layer):
    gate, up, down = (torch.stack([parts[i] for parts in layer.experts]) for i in range(3))

    def mix(x, shares, chosen):
        weights = x.new_zeros(len(x), len(layer.experts)).scatter(1, chosen, shares)
        y = F.silu(torch.einsum("th,ewh->tew", x, gate)) * torch.einsum("th,ewh->tew", x, up)
        return torch.einsum("tew,ehw,te->th", y, down, weights)

    return mix


def build(ctx):
    inner = honest_build(ctx)
    for layer in inner.layers:
        layer.mix = together(layer)
    return inner
