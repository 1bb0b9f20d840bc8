"""Rotary positions as the reference computes them, apart from those of the raw forwards (ModelConfig.rope_frequencies)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tideforge.engine.config import ModelConfig


def rope(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians a position of each pair [head_dim / 2], fp64, and the factor on cos and sin."""
    pair = torch.arange(config.head_dim // 2, dtype=torch.float64)
    turning = torch.exp(-pair * 2 / config.head_dim * math.log(config.rope_theta))
    scaling = config.rope_scaling
    if scaling is None:
        return turning, 1.0
    turns = scaling.original_max_position_embeddings * turning / (2 * math.pi)  # in the first context
    if scaling.rope_type == "llama3":
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return torch.lerp(turning / scaling.factor, turning, kept.clamp(0, 1)), 1.0
    # yarn: where along the pairs would exactly beta_fast, beta_slow turns lie? ln(turns) is linear in the pair's index.
    step = 2 / config.head_dim * math.log(config.rope_theta)
    ends = [math.log(float(turns[0]) / beta) / step for beta in (scaling.beta_fast, scaling.beta_slow)]
    if scaling.truncate:
        ends = [float(math.floor(ends[0])), float(math.ceil(ends[1]))]
    begin, end = max(ends[0], 0), min(ends[1], config.head_dim - 1)
    slowed = ((pair - begin) / (end - begin if end != begin else 1e-3)).clamp(0, 1)
    return torch.lerp(turning, turning / scaling.factor, slowed), _yarn_factor(config)


def _yarn_factor(config: ModelConfig) -> float:
    scaling = config.rope_scaling
    assert scaling is not None
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = 0.1 * math.log(max(scaling.factor, 1.0))
    if scaling.mscale and scaling.mscale_all_dim:
        return (1 + growth * scaling.mscale) / (1 + growth * scaling.mscale_all_dim)
    return 1 + growth


def yarn_temperature(config: ModelConfig) -> float:
    """What latent attention multiplies its scores by beside 1 / sqrt(dim)."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return (1 + 0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0))) ** 2
