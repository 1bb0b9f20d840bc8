"""A mixture of SwiGLU experts as two Triton kernels. Nothing waits for the host: shapes depend on the number of tokens alone.

A pair is a token and one of its k experts. Pairs are sorted by expert; each expert's pairs are cut into tiles of ROWS. How
many tiles there are is known on the device only, so the grid holds the most there can be and those beyond the last one end
at once. Weights stay where they are, a tensor an expert: kernels get their addresses in a table.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's parameters are device pointers and numbers; Triton specialises them itself.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_ROWS = 16  # of a matrix product on tensor cores
MOST_ROWS = 64
# Columns of a program, numbers that it reads of a row at a time, how far ahead: under 99 KiB of shared memory.
SINGLE, FEW, MANY = (32, 32, 3), (32, 128, 4), (64, 64, 3)


@triton.jit
def _find(starts, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """A tile's expert, its first sorted pair and the end of the expert's pairs; beyond the last tile the expert is EXPERTS."""
    each = tl.arange(0, PADDED)
    begins = tl.load(starts + each, mask=each < EXPERTS, other=0).to(tl.int32)
    ends = tl.load(starts + each + 1, mask=each < EXPERTS, other=0).to(tl.int32)
    tiles = (ends - begins + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((last <= tile) & (each < EXPERTS), 1, 0), 0)
    mine = each == expert
    begin = tl.sum(tl.where(mine, begins + (tile - last + tiles) * ROWS, 0), 0)
    return expert, begin, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _weights(table, expert, x, ALIGN: tl.constexpr):
    """The address that a table holds for an expert, as a pointer to numbers of x's kind."""
    pointer = tl.load(table + expert).to(tl.pointer_type(x.dtype.element_ty))
    return tl.multiple_of(pointer, ALIGN)


@triton.jit
def _gate_up(
    x, gates, ups, order, starts, inner,
    K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """inner [P, WIDTH], in sorted order: silu(x gate^T) * (x up^T) of each pair."""
    expert, begin, end = _find(starts, tl.program_id(0), EXPERTS, PADDED, ROWS)
    if expert == EXPERTS:
        return
    gate, up = _weights(gates, expert, x, ALIGN), _weights(ups, expert, x, ALIGN)
    place = begin + tl.arange(0, ROWS)
    real = place < end
    token = tl.load(order + place, mask=real, other=0) // K
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gated = tl.zeros([ROWS, COLUMNS], tl.float32)
    plain = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, HIDDEN, STEP):
        at = start + tl.arange(0, STEP)
        row = tl.load(x + token[:, None] * HIDDEN + at[None, :], mask=real[:, None] & (at < HIDDEN)[None, :], other=0.0)
        offset = column[None, :] * HIDDEN + at[:, None]
        inside = (column < WIDTH)[None, :] & (at < HIDDEN)[:, None]
        gated = tl.dot(row, tl.load(gate + offset, mask=inside, other=0.0), gated, input_precision=PRECISION)
        plain = tl.dot(row, tl.load(up + offset, mask=inside, other=0.0), plain, input_precision=PRECISION)
    value = gated / (1 + tl.exp(-gated)) * plain
    target = inner + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, value.to(inner.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _down(
    inner, downs, shares, order, starts, out,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [P, HIDDEN], in the order of tokens: share * (inner down^T) of each pair."""
    expert, begin, end = _find(starts, tl.program_id(0), EXPERTS, PADDED, ROWS)
    if expert == EXPERTS:
        return
    down = _weights(downs, expert, inner, ALIGN)
    place = begin + tl.arange(0, ROWS)
    real = place < end
    pair = tl.load(order + place, mask=real, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, STEP):
        at = start + tl.arange(0, STEP)
        row = tl.load(
            inner + place.to(tl.int64)[:, None] * WIDTH + at[None, :],
            mask=real[:, None] & (at < WIDTH)[None, :],
            other=0.0,
        )
        offset = column[None, :] * WIDTH + at[:, None]
        inside = (column < HIDDEN)[None, :] & (at < WIDTH)[:, None]
        total = tl.dot(row, tl.load(down + offset, mask=inside, other=0.0), total, input_precision=PRECISION)
    total *= tl.load(shares + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    target = out + pair[:, None] * HIDDEN + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (column < HIDDEN)[None, :])


class Experts:
    """Holds the weights of each expert, (gate [I, H], up [I, H], down [H, I]), and a table of where they lie."""

    def __init__(self, weights: list[tuple[Tensor, ...]]) -> None:
        self.weights = weights
        self.width, self.hidden = weights[0][0].shape
        every = [tensor for expert in weights for tensor in expert]
        self.dtype, device = every[0].dtype, every[0].device
        assert all(tensor.is_contiguous() and tensor.dtype == self.dtype for tensor in every)
        self.align = 16 if all(tensor.data_ptr() % 16 == 0 for tensor in every) else every[0].element_size()
        addresses = [[expert[part].data_ptr() for expert in weights] for part in range(3)]
        self.gates, self.ups, self.downs = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.numbers = torch.arange(len(weights) + 1, device=device)

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """x [T, H]; shares and chosen experts [T, k] -> [T, H], summed over k in one fixed order."""
        assert x.dtype == self.dtype, "weights are read as x's kind of number"
        (tokens, k), count, x = chosen.shape, len(self.weights), x.contiguous()
        pairs = tokens * k
        sorted_experts, order = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_experts, self.numbers)  # where each expert's pairs begin
        rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(pairs // count)))
        tiles = min(pairs, triton.cdiv(pairs, rows) + min(count, pairs))
        inner, out = x.new_empty(pairs, self.width), x.new_empty(pairs, self.hidden)
        single = x.dtype == torch.float32
        columns, step, stages = SINGLE if single else FEW if rows == LEAST_ROWS else MANY
        sizes = (count, triton.next_power_of_2(count), self.hidden, self.width, self.align, rows, columns, step)
        precision = "ieee" if single else "tf32"
        _gate_up[(tiles, triton.cdiv(self.width, columns))](
            x, self.gates, self.ups, order, starts, inner, k, *sizes, precision, num_stages=stages
        )
        _down[(tiles, triton.cdiv(self.hidden, columns))](
            inner, self.downs, shares.contiguous(), order, starts, out, *sizes, precision, num_stages=stages
        )
        return out.unflatten(0, (tokens, k)).sum(1)
