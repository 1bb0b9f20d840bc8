"""Cheaper arithmetic than an endpoint's own, as a cheat could use it: what the reference rounds before it computes.

A name says what is rounded and how: `weights:int8`, `kv:fp8u`, `operands:tf32`, `head:int8`; cheaper_names.py
holds them by the precision that they are cheaper than. Schemes: `int8` and `int4` round to multiples of a scale, the largest magnitude of a
row (of 128 and of 32 numbers in `int8g`, `int4g`) over 127 or 7; `fp8` is e4m3 scaled by row to its largest number, `fp8u` unscaled;
`tf32` keeps 10 bits of mantissa. `order:SEED` is honest: another reduction order at the endpoint's precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tideforge.engine.arithmetic import Arithmetic, Reordered


class Cheaper(Arithmetic):
    """fp32 on weights as stored at `dtype`, but for what `name` rounds. "" rounds nothing more."""

    def __init__(self, name: str, dtype: str) -> None:
        """ValueError for a name that it does not know."""
        self.dtype = getattr(torch, dtype)
        self.part, _, scheme = name.partition(":")
        if name and (self.part not in PARTS or scheme not in SCHEMES):
            raise ValueError(f"no cheaper arithmetic {name!r}")
        self.scheme = SCHEMES[scheme] if name else None

    def _rounded(self, part: str, x: Tensor) -> Tensor:
        return self.scheme(x) if self.scheme is not None and part == self.part else x

    def stored(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()

    def weight(self, x: Tensor) -> Tensor:
        x = self.stored(x)
        return self._rounded("weights", x) if x.dim() > 1 else x

    def head(self, x: Tensor) -> Tensor:
        return self._rounded("head", self.weight(x))

    def cached(self, x: Tensor) -> Tensor:
        return self._rounded("kv", x)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return self._rounded("operands", a) @ self._rounded("operands", b)


def arithmetic(name: str, dtype: str) -> Arithmetic:
    """Of a name; `order:SEED` is another order at `dtype`."""
    if name.startswith("order:"):
        return Reordered(getattr(torch, dtype), int(name.removeprefix("order:")))
    return Cheaper(name, dtype)


def _integers(levels: int, group: int | None = None) -> Callable[[Tensor], Tensor]:
    def scheme(x: Tensor) -> Tensor:
        whole = group is None or x.shape[-1] % group
        parts = x if whole else x.unflatten(-1, (-1, group))
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
        return ((parts / scale).round() * scale).reshape(x.shape)

    return scheme


def _fp8(x: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _unscaled_fp8(x: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn).float()


def mantissa(bits: int) -> Callable[[Tensor], Tensor]:
    """Rounds fp32 to so many explicit bits of mantissa, halves away from zero; the exponent stays."""
    drop = 23 - bits

    def scheme(x: Tensor) -> Tensor:
        return (x.contiguous().view(torch.int32) + (1 << drop >> 1) & -(1 << drop)).view(torch.float32)

    return scheme


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).float()


PARTS = ("weights", "head", "kv", "operands")
SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": _integers(127),
    "int8g": _integers(127, 128),
    "int4g": _integers(7, 32),
    "fp8": _fp8,
    "fp8u": _unscaled_fp8,
    "tf32": mantissa(10),
    "bfloat16": _to(torch.bfloat16),
    "float16": _to(torch.float16),
}
