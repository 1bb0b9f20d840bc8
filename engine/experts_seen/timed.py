"""Times the raw forward's mixtures on the CPU, with inputs of two kinds of tokens, A B B A."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tideforge.engine.experts_seen.drawn import CORPUS, RANDOM, Speaker, sequences_of
from tideforge.engine.experts_seen.routes import Router
from tideforge.engine.experts_seen.seen import Plan
from tideforge.engine.measure import Interval, interval

ROUND_S = 0.1
ROUNDS = 12


def measure(
    model: Path, texts: Mapping[str, Sequence[int]], plan: Plan, rounds: int = ROUNDS, round_s: float = ROUND_S
) -> dict[int, Interval]:
    """Seconds of all mixtures with random tokens over seconds with the corpus's, by tokens of a step. Every step has fresh inputs."""
    router = Router(model)
    drawn = sequences_of(texts, router.config.vocab_size, plan.sequences, plan.length, plan.seeds)
    inputs = [router.routes(drawn[kind]).inputs[:, :, plan.prompt :] for kind in (CORPUS, RANDOM)]
    with TemporaryDirectory() as state, torch.inference_mode():
        built: Any = Speaker(model, Path(state), 1, plan.length).executor.runner.forward
        layers = [layer for layer in built.layers if layer.sparse]
        return {n: interval(list(_ratios(layers, inputs, n, rounds, round_s))) for n in plan.tokens}


def _ratios(
    layers: Sequence[Any], inputs: Sequence[Tensor], tokens: int, rounds: int, round_s: float
) -> Iterator[float]:
    """One ratio a round, of `round_s` or more on the first side: steps in turn, A B B A, so that a machine's drift meets both alike."""
    generators = [torch.Generator().manual_seed(tokens) for _ in inputs]
    sources = [_steps(x, tokens, generator) for x, generator in zip(inputs, generators, strict=True)]
    for source in sources:
        _seconds(layers, next(source))
    for _ in range(rounds):
        spent = [0.0, 0.0]
        while spent[0] < round_s:
            for side in (0, 1, 1, 0):
                spent[side] += _seconds(layers, next(sources[side]))
        yield spent[1] / spent[0]


def _steps(inputs: Tensor, tokens: int, generator: torch.Generator) -> Iterator[Tensor]:
    """[mixtures, tokens, hidden] of decode steps, without end; inputs [mixtures, sequences, places, hidden]."""
    _, sequences, places, _ = inputs.shape
    while True:
        who = torch.randperm(sequences, generator=generator)[:tokens]
        yield inputs[:, who, torch.randint(places, (tokens,), generator=generator)]


def _seconds(layers: Sequence[Any], step: Tensor) -> float:
    """Of this thread, which computes alone: what others take of the core meanwhile does not count."""
    begin = time.thread_time()
    for layer, x in zip(layers, step.unbind(), strict=True):
        layer.mixture(x)
    return time.thread_time() - begin
