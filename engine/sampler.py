"""Sampling on the device. A row's token depends on its own logits, seed and position only, never on the batch.

On a GPU everything here can be captured: no shape and no launch depends on a value, so all rows are drawn where one is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits: Tensor, temperatures: Tensor, top_ps: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """logits [N, V] fp32, temperatures and top_ps [N] fp32, seeds and positions [N] int64 -> tokens [N] int64.

    temperature 0 takes the largest logit (the first of equals). A row that holds NaN gives -1: it was left untouched
    or went wrong, and no token of it may be emitted.
    """
    tokens = greedy(logits)
    # On the CPU a draw costs more than asking who wants one.
    rows = slice(None) if logits.is_cuda else temperatures.nonzero().squeeze(-1)
    chosen, heat = tokens[rows], temperatures[rows]
    uniform = counter_uniform(seeds[rows], positions[rows])
    drawn = draw(logits[rows], torch.where(heat > 0, heat, 1), top_ps[rows], uniform)
    tokens[rows] = torch.where((heat > 0) & (chosen >= 0), drawn, chosen)
    return tokens


def greedy(logits: Tensor) -> Tensor:
    """logits [N, V] -> tokens [N] int64: `sample` at temperature 0."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(torch.isnan(largest), -1, tokens)


def draw(logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniform: Tensor) -> Tensor:
    """Inverts the cumulative distribution of the nucleus: the smallest set of likeliest tokens that reaches top_p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    above = ordered.double() - ordered[:, :1].double()
    probabilities = torch.softmax(above / temperatures.double().unsqueeze(-1), dim=-1)
    cumulative = probabilities.cumsum(-1)
    kept = (cumulative - probabilities) < top_ps.double().unsqueeze(-1)
    kept[:, 0] = True
    mass = (probabilities * kept).sum(-1, keepdim=True)
    # The first rank whose cumulative mass exceeds the drawn share; rounding may push it past the last kept one.
    rank = (cumulative <= uniform.unsqueeze(-1) * mass).sum(-1)
    rank = torch.minimum(rank, kept.sum(-1) - 1)
    return order.gather(-1, rank.unsqueeze(-1)).squeeze(-1)


def counter_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform fp64 in [0, 1) from (seed, position): the finaliser of SplitMix64 (Steele, Lea, Flood 2014), twice."""
    return (_mix(_mix(seeds) + positions) >> 11).bitwise_and((1 << 53) - 1).double() / float(1 << 53)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64 in two's complement: int64 wraps, and shifts are made logical by masking the copied sign bits."""
    value = value + -7046029254386353131  # 0x9E3779B97F4A7C15
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return value ^ ((value >> 31) & ((1 << 33) - 1))
