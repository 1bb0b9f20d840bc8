"""A 64-bit digest of each slot of the KV pages, by values the same in numpy and in torch. Runs no candidate code.

A slot's 16-bit words (every float type has a whole number of them) times secret multipliers, uniform in 64 bits and one for
each place, summed modulo 2**64. Where two contents differ, some word differs by d with 0 < |d| < 2**16, so that d = odd * 2**v
with v <= 15. Whatever the other multipliers are, that word's one must then be one of 2**v of 2**64 for the sums to be equal: at
most 2**-49 for a changed slot, as long as nobody who writes pages knows the secret or sees a digest.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

WORDS = 1 << 22  # that become 64-bit numbers at once


@dataclasses.dataclass(frozen=True)
class Plane:
    """Where a layer's keys or values begin in the arena, how many slots they have and bytes a slot; all even."""

    offset: int
    slots: int
    each: int


def multipliers(secret: int, count: int) -> np.ndarray:
    """uint64 [count]; as near to uniform as numpy's default generator is."""
    return np.random.default_rng(secret).integers(0, 1 << 64, count, dtype=np.uint64)


def of_array(pages: np.ndarray, plane: Plane, secret: int) -> np.ndarray:
    """Of uint8 pages: uint64 [slots]."""
    words = pages[plane.offset : plane.offset + plane.slots * plane.each].view(np.uint16).reshape(plane.slots, -1)
    factors = multipliers(secret, words.shape[1])
    rows = max(1, WORDS // words.shape[1])
    parts = [(words[at : at + rows] * factors).sum(axis=1, dtype=np.uint64) for at in range(0, plane.slots, rows)]
    return np.concatenate(parts)


def of_tensor(pages: Tensor, plane: Plane, secret: int) -> np.ndarray:
    """As of_array, computed where the uint8 pages lie: int64 products and sums wrap."""
    import torch

    words = pages[plane.offset : plane.offset + plane.slots * plane.each].view(torch.int16).reshape(plane.slots, -1)
    factors = torch.from_numpy(multipliers(secret, words.shape[1]).view(np.int64)).to(pages.device)
    rows = max(1, WORDS // words.shape[1])
    parts = [
        ((words[at : at + rows].to(torch.int64) & 0xFFFF) * factors).sum(dim=1) for at in range(0, plane.slots, rows)
    ]
    return torch.cat(parts).cpu().numpy().view(np.uint64)
