"""Times the raw forward's mixtures on the CPU, with inputs of two kinds of tokens, A B B A."""

from __future__ import annotations

import itertools
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

BLOCK_S = 0.06
ROUNDS = 16


def measure(
    model: Path, texts: Mapping[str, Sequence[int]], plan: Plan, rounds: int = ROUNDS, block_s: float = BLOCK_S
) -> dict[int, Interval]:
    """Seconds of all mixtures with random tokens over seconds with the corpus's, by tokens of a step. Every step has fresh inputs."""
    router = Router(model)
    drawn = sequences_of(texts, router.config.vocab_size, plan.sequences, plan.length, plan.seeds)
    inputs = [router.routes(drawn[kind]).inputs[:, :, plan.prompt :] for kind in (CORPUS, RANDOM)]
    with TemporaryDirectory() as state, torch.inference_mode():
        built: Any = Speaker(model, Path(state), 1, plan.length).executor.runner.forward
        layers = [layer for layer in built.layers if layer.sparse]
        return {n: interval(list(_ratios(layers, inputs, n, rounds, block_s))) for n in plan.tokens}


def _ratios(
    layers: Sequence[Any], inputs: Sequence[Tensor], tokens: int, rounds: int, block_s: float
) -> Iterator[float]:
    generators = [torch.Generator().manual_seed(tokens) for _ in inputs]
    sources = [_steps(x, tokens, generator) for x, generator in zip(inputs, generators, strict=True)]
    count = 1
    while _block(layers, list(itertools.islice(sources[0], count))) < block_s:
        count *= 2
    _block(layers, list(itertools.islice(sources[1], count)))
    for _ in range(rounds):
        a1, b1, b2, a2 = (_block(layers, list(itertools.islice(sources[side], count))) for side in (0, 1, 1, 0))
        yield (b1 + b2) / (a1 + a2)


def _steps(inputs: Tensor, tokens: int, generator: torch.Generator) -> Iterator[Tensor]:
    """[mixtures, tokens, hidden] of decode steps, without end; inputs [mixtures, sequences, places, hidden]."""
    _, sequences, places, _ = inputs.shape
    while True:
        who = torch.randperm(sequences, generator=generator)[:tokens]
        yield inputs[:, who, torch.randint(places, (tokens,), generator=generator)]


def _block(layers: Sequence[Any], steps: Sequence[Tensor]) -> float:
    begin = time.perf_counter()
    for step in steps:
        for layer, x in zip(layers, step.unbind(), strict=True):
            layer.mixture(x)
    return time.perf_counter() - begin
