"""Attention over paged keys and values as Triton kernels: one for decodes, split over the context, one for any mixture.

Online softmax (Milakov, Gimelshein 2018) over tiles of the context; the splits of a decode are merged by their largest
logit and sum, as in Flash-Decoding (Dao et al. 2023). Query heads of one key head are computed together. Products on tensor
cores take powers of two: a head of DIM numbers is read as WIDE, with zeros behind it.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel's parameters are device pointers and numbers; Triton specialises them itself.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch

SPLIT = 256  # tokens of context that one program of a decode reads
TILE = 64  # tokens of context read at a time
ROWS = 16  # least rows of a matrix product on tensor cores
QUERIES, WARPS = 64, 4  # query tokens of one program of a prefill
LONG, LONG_QUERIES, LONG_WARPS = (
    1024,
    128,
    8,
)  # the same for chunks from LONG tokens on: half the reads of keys and values
LOG2_E = 1.4426950408889634  # logits are scaled by it, so that softmax is of powers of two


@triton.jit
def _tile(
    q, keys, values, table, kv_head, start, length, visible, largest, total, out, scale, kv_heads,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Takes context tokens [start, start + TILE) into the running softmax. q [R, WIDE]; visible [R]: last position seen.

    ALL: every token of the tile is there, and seen by every query.
    """
    at = start + tl.arange(0, TILE)
    there = at < length
    block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    offset = ((block * BLOCK_SIZE + at % BLOCK_SIZE) * kv_heads + kv_head) * DIM
    dims = tl.arange(0, WIDE)
    inside_k, inside_v = there[None, :], there[:, None]
    if DIM < WIDE:
        inside_k, inside_v = inside_k & (dims < DIM)[:, None], inside_v & (dims < DIM)[None, :]
    k = tl.load(keys + offset[None, :] + dims[:, None], mask=inside_k, other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if not ALL:
        scores = tl.where(there[None, :] & (at[None, :] <= visible[:, None]), scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores - new_largest[:, None])
    v = tl.load(values + offset[:, None] + dims[None, :], mask=inside_v, other=0.0)
    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_largest, total * shrink + tl.sum(weights, 1), out


@triton.jit
def _decode(
    q, keys, values, tables, lengths, out, partial, stats, scale, table_width, heads, kv_heads,
    GROUP: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one split of the context. Writes `out` itself when there is one split only."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    begin = split * SPLIT
    if begin >= length:
        return
    end = tl.minimum(begin + SPLIT, length)
    group, dims = tl.arange(0, PADDED), tl.arange(0, WIDE)
    head = kv_head * GROUP + group
    real = group < GROUP
    place = (row * heads + head)[:, None] * DIM + dims[None, :]
    inside = real[:, None]
    if DIM < WIDE:
        inside = inside & (dims < DIM)[None, :]
    query = tl.load(q + place, mask=inside, other=0.0)
    largest = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    acc = tl.zeros([PADDED, WIDE], tl.float32)
    visible = tl.full([PADDED], 2147483647, tl.int32)
    for start in range(begin, end, TILE):
        largest, total, acc = _tile(
            query, keys, values, tables + row * table_width, kv_head, start, end, visible, largest, total, acc, scale,
            kv_heads, BLOCK_SIZE, DIM, WIDE, TILE, PRECISION, False,
        )  # fmt: skip
    if SPLITS == 1:
        tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        slot = (row * heads + head).to(tl.int64) * SPLITS + split
        tl.store(partial + slot[:, None] * WIDE + dims[None, :], acc, mask=real[:, None])
        tl.store(stats + slot * 2, largest, mask=real)
        tl.store(stats + slot * 2 + 1, total, mask=real)


@triton.jit
def _merge(
    partial, stats, lengths, out, heads, DIM: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Puts the splits of one row and head together."""
    row, head = tl.program_id(0), tl.program_id(1)
    used = tl.cdiv(tl.load(lengths + row), SPLIT)
    base, dims = (row * heads + head).to(tl.int64) * SPLITS, tl.arange(0, WIDE)
    largest = float("-inf")
    for split in range(used):
        largest = tl.maximum(largest, tl.load(stats + (base + split) * 2))
    total, acc = 0.0, tl.zeros([WIDE], tl.float32)
    for split in range(used):
        weight = tl.exp2(tl.load(stats + (base + split) * 2) - largest)
        total += weight * tl.load(stats + (base + split) * 2 + 1)
        acc += weight * tl.load(partial + (base + split) * WIDE + dims)
    tl.store(out + (row * heads + head) * DIM + dims, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _mixed(
    q, keys, values, tables, lengths, starts, out, scale, table_width, heads, kv_heads,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """QUERIES query tokens of one row, one head: prefill chunks, and decodes beside them."""
    row, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    if tile * QUERIES >= last - first:
        return
    length = tl.load(lengths + row)
    offset = tile * QUERIES + tl.arange(0, QUERIES)
    real = offset < last - first
    positions = length - (last - first) + offset
    dims = tl.arange(0, WIDE)
    place = ((first + offset).to(tl.int64) * heads + head)[:, None] * DIM + dims[None, :]
    inside = real[:, None]
    if DIM < WIDE:
        inside = inside & (dims < DIM)[None, :]
    query = tl.load(q + place, mask=inside, other=0.0)
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, WIDE], tl.float32)
    begin = length - (last - first) + tile * QUERIES
    seen_by_all = (begin + 1) // TILE * TILE
    for start in range(0, seen_by_all, TILE):
        largest, total, acc = _tile(
            query, keys, values, tables + row * table_width, head // GROUP, start, length, positions, largest, total, acc,
            scale, kv_heads, BLOCK_SIZE, DIM, WIDE, TILE, PRECISION, True,
        )  # fmt: skip
    for start in range(seen_by_all, tl.minimum(length, begin + QUERIES), TILE):
        largest, total, acc = _tile(
            query, keys, values, tables + row * table_width, head // GROUP, start, length, positions, largest, total, acc,
            scale, kv_heads, BLOCK_SIZE, DIM, WIDE, TILE, PRECISION, False,
        )  # fmt: skip
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
    """q [T, heads, D] over keys and values [num_blocks, block_size, kv_heads, D] -> [T, heads, D]."""
    q = q.contiguous()
    out = torch.empty_like(q)
    tables, (_, block_size, kv_heads, dim), heads = batch.block_tables[0], keys.shape, q.shape[1]
    group, rows, scale = heads // kv_heads, len(batch.seq_lens), dim**-0.5 * LOG2_E
    wide = max(ROWS, triton.next_power_of_2(dim))
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    if batch.num_prefills:
        queries, warps = (QUERIES, WARPS) if batch.max_query_len < LONG else (LONG_QUERIES, LONG_WARPS)
        grid = (rows, triton.cdiv(batch.max_query_len, queries), heads)
        _mixed[grid](
            q, keys, values, tables, batch.seq_lens, batch.query_start_loc, out, scale, tables.stride(0), heads, kv_heads,
            group, queries, block_size, dim, wide, TILE, precision, num_warps=warps,
        )  # fmt: skip
        return out
    splits = triton.cdiv(batch.max_seq_len, SPLIT)
    partial = torch.empty((rows, heads, splits, wide) if splits > 1 else (0,), dtype=torch.float32, device=q.device)
    stats = torch.empty((rows, heads, splits, 2) if splits > 1 else (0,), dtype=torch.float32, device=q.device)
    _decode[(rows, kv_heads, splits)](
        q, keys, values, tables, batch.seq_lens, out, partial, stats, scale, tables.stride(0), heads, kv_heads,
        group, max(ROWS, triton.next_power_of_2(group)), block_size, dim, wide, TILE, SPLIT, splits, precision,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows, heads)](partial, stats, batch.seq_lens, out, heads, dim, wide, SPLIT, splits)
    return out
