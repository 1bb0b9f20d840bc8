"""Exchangeable arithmetic of the reference: fp32 in torch's own order, or any other order at the precision under test."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor


class Arithmetic:
    """fp32 throughout, in torch's own order."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, kept in fp32: what feeds a decision that a model takes in fp32 whatever its precision."""
        return a @ b

    def mean_square(self, x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True)

    def round(self, x: Tensor) -> Tensor:
        return x

    def stored(self, x: Tensor) -> Tensor:
        """Numbers of a checkpoint as an endpoint stores them."""
        return self.round(x)

    def weight(self, x: Tensor) -> Tensor:
        """A weight as it is used: [..., out, in], or a vector."""
        return self.stored(x)

    def head(self, x: Tensor) -> Tensor:
        """The weight [V, hidden] that logits come from."""
        return self.weight(x)

    def cached(self, x: Tensor) -> Tensor:
        """K or V [T, heads, dim] as attention reads it."""
        return x

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.round(self.product(a, b))


class Reordered(Arithmetic):
    """Every contraction in blocks of random width, added one after another in random order; results rounded to `dtype`.

    Blocks accumulate in fp32, as kernels for 16-bit types do; what is stored between operations has the precision.
    """

    def __init__(self, dtype: torch.dtype, seed: int, widths: tuple[int, int] = (16, 128)) -> None:
        self.dtype, self.random, self.widths = dtype, random.Random(seed), widths

    def blocks(self, length: int) -> list[slice]:
        """Covers range(length) once, in blocks of `widths`."""
        cuts = [0]
        while cuts[-1] < length:
            cuts.append(min(length, cuts[-1] + self.random.randint(*self.widths)))
        parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
        self.random.shuffle(parts)
        return parts

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        for part in self.blocks(a.shape[-1]):
            if a.dim() == 2:
                total.addmm_(a[:, part], b[part])
            else:
                total.baddbmm_(a[..., part], b[..., part, :])
        return total

    def mean_square(self, x: Tensor) -> Tensor:
        squares = x.pow(2)
        total = x.new_zeros(*x.shape[:-1], 1)
        for part in self.blocks(x.shape[-1]):
            total += squares[..., part].sum(-1, keepdim=True)
        return total / x.shape[-1]

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()


class OneChain(Reordered):
    """Every contraction by a single accumulator, a term at a time: the longest chain of additions that a kernel can have."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__(dtype, seed, (1, 1))


class Split(Reordered):
    """Partial sums are rounded too, as where a contraction is split over programs that add up in 16 bits."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        total = a.new_zeros(*a.shape[:-1], b.shape[-1])
        half = a.shape[-1] // 2
        for part in (slice(half, None), slice(0, half)):
            total = self.round(total + self.round(super().product(a[..., part], b[..., part, :])))
        return total


class Fused(Reordered):
    """Nothing is rounded between operations but what a contraction reads and a cache holds."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return super().product(a.to(self.dtype).float(), b.to(self.dtype).float())

    def round(self, x: Tensor) -> Tensor:
        return x

    def cached(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()
