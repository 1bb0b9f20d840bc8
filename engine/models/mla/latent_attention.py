"""Attention over paged latents as Triton kernels: a token's key is its latent and its rotated part, its value the latent alone.

All heads share a token's page, so queries and heads of a sequence are one list of pairs, cut into tiles of ROWS. A decode is
split over the context as well and its splits merged by their largest logit and sum, as in Flash-Decoding (Dao et al. 2023);
within a split the softmax is online (Milakov, Gimelshein 2018). Products on tensor cores take powers of two: R numbers of a
latent are read as WIDE, the D of a rotated part as TURNED, with zeros behind them.
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
TILE, TILE_SINGLE = 32, 16  # tokens of context read at a time; in fp32 a tile of 32 spills registers
LEAST = 16  # rows, columns or depth of a matrix product on tensor cores
ROWS = 32  # pairs of one program of a prefill


@triton.jit
def _attend(
    q, latents, parts, tables, lengths, starts, out, partial, stats, scale, table_width, heads,
    BLOCK_SIZE: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS pairs of one sequence, one split of the context. Writes `out` itself when there is one split only."""
    tile, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    length = tl.load(lengths + row)
    pairs = (last - first) * heads
    earlier = length - (last - first)
    begin = split * SPLIT
    end = tl.minimum(length, earlier + ((tile + 1) * ROWS - 1) // heads + 1)  # what the tile's last pair sees
    if SPLITS > 1:
        end = tl.minimum(end, begin + SPLIT)
    if (tile * ROWS >= pairs) | (begin >= end):
        return
    pair = tile * ROWS + tl.arange(0, ROWS)
    real, position = pair < pairs, earlier + pair // heads
    place = (first * heads + pair).to(tl.int64)
    wide, turned = tl.arange(0, WIDE), tl.arange(0, TURNED)
    inside = real[:, None] & (wide < R)[None, :]
    query = tl.load(q + place[:, None] * (R + D) + wide[None, :], mask=inside, other=0.0)
    query_part = tl.load(
        q + place[:, None] * (R + D) + R + turned[None, :], mask=real[:, None] & (turned < D)[None, :], other=0.0
    )
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        there = at < end
        block = tl.load(tables + row * table_width + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + at % BLOCK_SIZE
        latent = tl.load(
            latents + slot[:, None] * R + wide[None, :], mask=there[:, None] & (wide < R)[None, :], other=0.0
        )
        part = tl.load(
            parts + slot[None, :] * D + turned[:, None], mask=there[None, :] & (turned < D)[:, None], other=0.0
        )
        scores = tl.dot(query, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(query_part, part, scores, input_precision=PRECISION) * scale
        scores = tl.where(there[None, :] & (at[None, :] <= position[:, None]), scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest
    if SPLITS == 1:
        target = out + place[:, None] * R + wide[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        slot = place * SPLITS + split
        tl.store(partial + slot[:, None] * WIDE + wide[None, :], acc, mask=real[:, None])
        tl.store(stats + slot * 2, largest, mask=real)
        tl.store(stats + slot * 2 + 1, total, mask=real)


@triton.jit
def _merge(
    partial, stats, lengths, out, heads,
    R: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Puts the splits of one decode and head together."""
    row, head = tl.program_id(0), tl.program_id(1)
    used = tl.cdiv(tl.load(lengths + row), SPLIT)
    base, wide = (row * heads + head).to(tl.int64) * SPLITS, tl.arange(0, WIDE)
    largest = float("-inf")
    for split in range(used):
        largest = tl.maximum(largest, tl.load(stats + (base + split) * 2))
    total, acc = 0.0, tl.zeros([WIDE], tl.float32)
    for split in range(used):
        weight = tl.exp(tl.load(stats + (base + split) * 2) - largest)
        total += weight * tl.load(stats + (base + split) * 2 + 1)
        acc += weight * tl.load(partial + (base + split) * WIDE + wide)
    tl.store(out + (row * heads + head).to(tl.int64) * R + wide, (acc / total).to(out.dtype.element_ty), mask=wide < R)


def latent_attention(q: Tensor, latents: Tensor, parts: Tensor, batch: Batch, scale: float) -> Tensor:
    """q [T, heads, R + D] over latents [num_blocks, block_size, 1, R] and rotated parts [.., 1, D] -> [T, heads, R]."""
    (tokens, heads, _), (_, block_size, _, r), d = q.shape, latents.shape, parts.shape[-1]
    q, tables, sequences = q.contiguous(), batch.block_tables[0], len(batch.seq_lens)
    out = q.new_empty(tokens, heads, r)
    single, decodes = q.dtype == torch.float32, not batch.num_prefills
    rows, tile = LEAST if single or decodes else ROWS, TILE_SINGLE if single else TILE
    splits = triton.cdiv(batch.max_seq_len, SPLIT) if decodes else 1
    wide, turned = (max(LEAST, triton.next_power_of_2(size)) for size in (r, d))
    kept = (tokens * heads, splits) if splits > 1 else (0, 0)
    partial = torch.empty((*kept, wide), dtype=torch.float32, device=q.device)
    stats = torch.empty((*kept, 2), dtype=torch.float32, device=q.device)
    _attend[(triton.cdiv(batch.max_query_len * heads, rows), sequences, splits)](  # the first may exceed 65,535
        q, latents, parts, tables, batch.seq_lens, batch.query_start_loc, out, partial, stats, scale, tables.stride(0), heads,
        block_size, r, wide, d, turned, rows, tile, SPLIT, splits, "ieee" if single else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge[(sequences, heads)](partial, stats, batch.seq_lens, out, heads, r, wide, SPLIT, splits)
    return out
