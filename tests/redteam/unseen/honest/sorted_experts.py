"""Experts as three stacked tensors and tokens sorted by expert: one batched product for all, padded to the fullest expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run
PACKING = 786_432  # bytes that it keeps beside the weights

ARCHITECTURE = "moe"


class Sorted:
    def __init__(self, experts: Any) -> None:
        self.gate, self.up, self.down = (torch.stack(part) for part in zip(*experts, strict=True))

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        experts, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
        row = torch.repeat_interleave(torch.arange(len(experts)), counts)
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[row]
        tokens = order // chosen.shape[1]
        padded = x.new_zeros(len(experts), int(counts.max()), x.shape[-1])
        padded[row, place] = x[tokens]
        gate, up = (padded @ part[experts].mT for part in (self.gate, self.up))
        results = (F.silu(gate) * up @ self.down[experts].mT)[row, place] * shares.flatten()[order, None]
        back = torch.empty_like(results)
        back[order] = results
        return back.unflatten(0, chosen.shape).sum(1)


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    for layer in forward.layers:
        if layer.sparse:
            layer.mix = Sorted(layer.experts)
    return forward
