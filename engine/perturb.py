"""Weights that a seed changes: some rows of every tensor negated. Exact at every precision, so whoever does it gets the same.

The keeper does it to what workers map, the reference to what it reads; neither tells a candidate which rows.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from tideforge.engine.stored import Stored

SHARE = 0.25  # of a tensor's rows (entries, where it has one dimension)


def negated_rows(seed: int, name: str, rows: int) -> np.ndarray:
    """bool [rows], at least one of them."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    chosen = rng.random(rows) < SHARE
    chosen[rng.integers(rows)] = True
    return chosen


def negate(tensor: Tensor, seed: int, name: str) -> None:
    """In place."""
    chosen = torch.from_numpy(negated_rows(seed, name, tensor.shape[0])).to(tensor.device)
    tensor[chosen] = -tensor[chosen]


class Perturbed:
    """A model folder's tensors under a seed (stored.Stored)."""

    def __init__(self, inner: Stored, seed: int) -> None:
        self.inner, self.seed = inner, seed

    @property
    def names(self) -> list[str]:
        return self.inner.names

    def tensor(self, name: str, device: torch.device) -> Tensor:
        tensor = self.inner.tensor(name, device).clone()
        negate(tensor, self.seed, name)
        return tensor
