"""Measures how far honest forwards are from the reference, compared with its own orders on the same tokens.

`python -m tideforge.engine.gates.thresholds [--model FOLDER ...] [--draws N] [--out FILE]` writes data/thresholds.json.

Honest forwards: other seeds of the order, a single accumulator, sums split and rounded in parts, results that stay unrounded
between operations, and the raw forwards as the engine runs them. Of each figure r, a ratio to what the reference's own orders
make on the same tokens, the upper half of log r is fitted by a normal distribution; the limit is its quantile at FALSE_ALARM,
and at least the largest seen. Deviations of matched filters are fitted likewise, about 0 and without the logarithm. Gates read
the limits by precision and kind of model (a router's close choices make a heavy tail).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from tideforge.engine import compare, matched
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, ModelConfig, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.doubles import DOUBLES
from tideforge.engine.evaluate import environment
from tideforge.engine.forward import Forward
from tideforge.engine.gates.forced import ORDERS
from tideforge.engine.gates.quality import COUNT, LENGTH, START
from tideforge.engine.limits import FILE, kind
from tideforge.engine.model_config import model_for

FALSE_ALARM = 1e-6  # a figure of a gate
DTYPES = ("float32", "bfloat16")
ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "data" / "samples" / "corpus.txt"
TRAINED = ROOT / "data" / "models" / "small-moe"
FEW = 3  # of a large model, whose draws take seconds each
DEVIATIONS = "deviations"
LARGE = 1 << 8  # hidden size from which a model is large


def honest(dtype: str, seed: int) -> dict[str, Any]:
    import torch

    from tideforge.engine.arithmetic import Fused, OneChain, Reordered, Split

    kinds = {"another order": Reordered, "a single accumulator": OneChain, "sums in parts": Split, "fused": Fused}
    return {name: make(getattr(torch, dtype), seed) for name, make in kinds.items()}


def spans(tokens: Sequence[int], seed: int) -> list[list[int]]:
    at = random.Random(seed)
    return [
        list(tokens[begin : begin + LENGTH]) for begin in (at.randrange(len(tokens) - LENGTH) for _ in range(COUNT))
    ]


def text_of(model: Path, vocabulary: int) -> list[int]:
    """Token ids of the sample corpus."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(CORPUS.read_text()).ids
    return [token for token in ids if token < vocabulary]


class Bare:
    """What Recorder reads of an arena, of a forward in this process."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def logits(self, rows: int) -> np.ndarray:
        return np.asarray(self.memory.logits[:rows].numpy())


def raw_logits(model: Path, dtype: str, every: Sequence[Sequence[Sequence[int]]], state: Path) -> list[np.ndarray]:
    """The raw forward's, as the engine runs it, for each set of spans."""
    from tideforge.engine.gates.probe import Recorder, drain
    from tideforge.engine.local import LocalExecutor, LocalMemory
    from tideforge.engine.scheduler import Request

    limits = Limits(max_num_seqs=COUNT, max_num_batched_tokens=128, max_model_len=256)
    memory = LocalMemory(Settings(state, model, dtype=dtype, num_blocks=COUNT * 4 + 1, limits=limits))
    forward = Forward.load(model_for(memory.config.architecture))
    executor, found = LocalExecutor(forward, memory), []
    for sequences in every:
        forced = {str(index): span[START:] for index, span in enumerate(sequences)}
        recorder = Recorder(executor, Bare(memory), forced)  # type: ignore[arg-type]
        core = EngineCore(limits, BlockPool(COUNT * 4 + 1, 16, False))
        core.attach(forward.id, recorder)
        requests = [
            Request(str(i), tuple(s[:START]), LENGTH - START, forward=forward.id) for i, s in enumerate(sequences)
        ]
        drain(core, requests, COUNT)
        found.append(np.stack([row.logits for name in forced for row in recorder.rows[name]]))
    return found


def figures(model: Path, dtype: str, draws: int, state: Path) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """(honest forward, its figures) of each draw."""
    import torch

    from tideforge.engine.arithmetic import Arithmetic, Reordered
    from tideforge.engine.cheaper import Cheaper
    from tideforge.engine.cheaper_names import NAMES
    from tideforge.engine.reference_model import ReferenceModel

    reference = ReferenceModel(model)
    text = text_of(model, reference.config.vocab_size)
    draws = min(draws, FEW) if reference.config.hidden_size > LARGE else draws
    every = [spans(text, seed) for seed in range(draws)]
    rows = [i * LENGTH + j for i in range(COUNT) for j in range(START - 1, LENGTH - 1)]
    short = compare.measure(
        dtype, *_short(reference, text[len(text) // 2 :][:64], dtype)
    ).logit_max  # as Reference.bounds measures it
    for seed, (sequences, raw) in enumerate(zip(every, raw_logits(model, dtype, every, state), strict=True)):

        def run(arithmetic: Arithmetic, sequences: Sequence[Sequence[int]] = sequences) -> np.ndarray:
            return np.asarray(reference.together(sequences, rows, None, arithmetic).logits.numpy())

        plain, base = run(Arithmetic()), run(Cheaper("", dtype))
        orders = [run(Reordered(getattr(torch, dtype), 1000 * seed + i)) for i in range(ORDERS)]
        noise = [matched.centred(order - base) for order in orders]
        cheaper = {name: matched.centred(run(Cheaper(name, dtype)) - base) for name in NAMES[dtype]}
        tried = {"raw": raw} | {name: run(how) for name, how in honest(dtype, 1000 * seed + 500).items()}
        for name, logits in tried.items():
            kl = compare.Spread.of(compare.kl(plain, logits))
            ratios = kl.over([compare.Spread.of(compare.kl(plain, order)) for order in orders])
            errors = matched.centred(logits - base)
            readings = [matched.reading(errors, noise, d) for d in cheaper.values()]
            deviations = [abs(reading.deviations) for reading in readings if reading is not None and reading.error > 0]
            yield (
                name,
                {
                    **{f"kl_{figure}": [ratio] for figure, ratio in ratios.items()},
                    "logit_max": [float(np.abs(logits - plain).max()) / short],
                    DEVIATIONS: deviations,
                },
            )


def _short(reference: Any, tokens: Sequence[int], dtype: str) -> tuple[Any, Any]:
    import torch

    from tideforge.engine.arithmetic import Arithmetic, Reordered
    from tideforge.engine.reference import ORDERS as SHORT_ORDERS
    from tideforge.engine.reference_model import as_numpy

    runs = [Reordered(getattr(torch, dtype), seed) for seed in range(SHORT_ORDERS)]
    base, *others = [as_numpy(reference.forward(tokens, None, None, how)) for how in (Arithmetic(), *runs)]
    return base, others


@dataclasses.dataclass(frozen=True)
class Fit:
    """Of one figure over honest forwards, models and draws."""

    limit: float
    largest: float
    middle: float
    spread: float  # of the upper half about the middle: of logarithms for a ratio, else of the readings
    readings: int

    @classmethod
    def of(cls, values: Sequence[float], logarithms: bool) -> Fit:
        scale = np.log(np.maximum(values, 1e-9)) if logarithms else np.asarray(values)
        middle = float(np.median(scale)) if logarithms else 0.0
        upper = scale[scale >= middle] - middle
        spread = float(np.sqrt(np.mean(upper**2)))
        quantile = middle + NormalDist().inv_cdf(1 - FALSE_ALARM) * spread
        limit = max(math.exp(quantile) if logarithms else quantile, *values)
        return cls(limit, max(values), middle, spread, len(values))


def measure(models: Mapping[str, Path], draws: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """{precision/kind: {figure: {model: honest forward: readings}}}."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (name, model), dtype in itertools.product(models.items(), DTYPES):
        begin, of = time.perf_counter(), found.setdefault(f"{dtype}/{kind(ModelConfig.load(model))}", {})
        with tempfile.TemporaryDirectory() as state:
            for forward, seen in figures(model, dtype, draws, Path(state)):
                for figure, values in seen.items():
                    of.setdefault(figure, {}).setdefault(f"{name}: {forward}", []).extend(values)
        print(f"{name} {dtype}: {time.perf_counter() - begin:.1f} s", flush=True)
    return found


def fit(readings: Mapping[str, Sequence[float]], figure: str) -> Fit:
    return Fit.of([value for values in readings.values() for value in values], figure != DEVIATIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description="measure honest forwards' noise and write the limits that gates read")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a folder beside the small models")
    parser.add_argument("--draws", type=int, default=12, help="of texts and orders, for each small model")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # as a worker's default
    with tempfile.TemporaryDirectory() as folder:
        models = {name: make(Path(folder) / name) for name, make in DOUBLES.items()}
        models |= {"small-moe": TRAINED} | {model.name: model for model in args.model}
        found = measure(models, args.draws)
    fits = {key: {figure: fit(readings, figure) for figure, readings in of.items()} for key, of in found.items()}
    limits = {key: {figure: each.limit for figure, each in of.items()} for key, of in fits.items()}
    largest = {
        key: {figure: {name: max(values) for name, values in readings.items()} for figure, readings in of.items()}
        for key, of in found.items()
    }
    record = {
        "command": "python -m tideforge.engine.gates.thresholds", "models": [*models], "draws": args.draws,
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "environment": environment(), "false_alarm": FALSE_ALARM,
        "limits": limits, "fits": {key: {f: dataclasses.asdict(fit) for f, fit in of.items()} for key, of in fits.items()},
        "largest": largest,
    }  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(limits))


if __name__ == "__main__":
    main()
