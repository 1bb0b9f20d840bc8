"""What was measured in public, as signs and crossovers that a price must reproduce. docs/log.md has those that it does not."""

from __future__ import annotations

import math

import pytest

from tideforge.costmodel import hardware, shapes
from tideforge.costmodel.coefficients import Coefficients
from tideforge.costmodel.layouts import Layout
from tideforge.costmodel.memory import Limits, Precision
from tideforge.costmodel.passes import Setting
from tideforge.costmodel.predict import Traffic, predict

GPUS = 8


def tokens_per_s(model: str, machine: str, weights: str, layout: Layout, traffic: Traffic) -> float:
    shape = shapes.get(model)
    precision = Precision(shape.common_precision if shape.experts else weights, weights, "fp8")
    setting = Setting(layout, shape, hardware.get(machine), precision, Coefficients())
    return predict(setting, traffic, Limits()).output_tokens_per_s


def crossover(model: str, machine: str, weights: str, prompt: int, wide: int) -> float:
    """Users a GPU from which on engines half as wide give more; they double until they do."""
    for step in range(-8, 40):
        users = 2 ** (step / 4)
        traffic = Traffic(prompt, 1024, users * GPUS)
        whole, half = (
            tokens_per_s(model, machine, weights, Layout(tp=tp, replicas=GPUS // tp), traffic)
            for tp in (wide, wide // 2)
        )
        if half > whole:
            return users
    return math.inf


@pytest.mark.parametrize(
    ("model", "machine", "weights", "prompt", "wide", "least", "most"),
    [
        ("Qwen3-32B", "h100", "fp8", 1024, 8, 2, 4),
        ("Qwen3-32B", "h100", "fp8", 1024, 4, 16, 32),
        ("Llama-3.1-70B", "b200", "fp4", 1024, 4, 8, 16),
        ("Llama-3.1-70B", "h200", "fp8", 8192, 8, 2, 4),
        ("Llama-3.1-70B", "h200", "fp8", 8192, 4, 4, 8),
    ],
)
def test_engines_give_way_to_narrower_ones_within_a_factor_of_two_of_where_they_were_measured_to(
    model: str, machine: str, weights: str, prompt: int, wide: int, least: float, most: float
) -> None:
    assert least / 2 <= crossover(model, machine, weights, prompt, wide) <= most * 2


def test_attention_in_parallel_by_data_wins_with_many_users_only() -> None:
    """DeepSeek-R1 on 8 MI300X: TP8+EP8 was ahead at 64 users, DP8+EP8 by 47 % at 1,024."""
    layouts = Layout(tp=8, ep=8), Layout(dp=8, ep=8)
    few, many = (
        [tokens_per_s("DeepSeek-R1", "mi300x", "fp8", layout, Traffic(1024, 1024, users)) for layout in layouts]
        for users in (64, 1024)
    )
    assert few[0] > few[1] and many[1] > 1.2 * many[0]


def test_context_parallel_decode_goes_on_where_tensor_parallel_runs_out_of_space() -> None:
    """Kimi-K2.6 on 8 B200: TP8/EP8 was out of KV space at 64 users, DCP8 went on to 3.3 times its tokens/s at 512. Its prompts
    are not known, and most of them were cached: only the sign is asked for."""

    def at(users: float, dcp: int) -> float:
        layout = Layout(tp=8, ep=8, dcp=dcp)
        return tokens_per_s("Kimi-K2-Instruct", "b200", "fp4", layout, Traffic(65_536, 1024, users))

    assert at(512, 1) < 1.1 * at(64, 1) and at(512, 8) > 1.1 * at(512, 1)


def test_pipelines_are_behind_tensor_parallel_where_gpus_are_linked() -> None:
    """Measured at 37 to 70 % of TP on NVLink."""
    traffic = Traffic(1024, 1024, 64)
    tp, pp = (
        tokens_per_s("Llama-3.1-70B", "h100", "fp8", layout, traffic) for layout in (Layout(tp=4), Layout(tp=1, pp=4))
    )
    assert 0.3 < pp / tp < 0.8
