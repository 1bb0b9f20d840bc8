"""`python -m tideforge.engine.bench PART`: measures the engine. Tables first, one JSON object as the last line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tideforge.engine import random_weights
from tideforge.engine.bench import decode, trials
from tideforge.engine.config import Limits, Settings
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab, end_keeper

MODELS = Path(__file__).parents[1] / "models"


@dataclasses.dataclass(frozen=True)
class Size:
    """What a part runs at: the real one on a GPU, a small one on the CPU."""

    shape: str
    dtype: str
    trials: int
    seconds: float  # at most, for a part made of trials
    users: tuple[int, ...]
    prompts: tuple[int, ...]  # tokens, one a number of users
    output: int


GPU = Size("llama-3.2-1b", "bfloat16", 200, 400.0, (1, 64), (32, 512), 128)
CPU = Size("llama-tiny", "float32", 4, 60.0, (1, 4), (8, 16), 16)


def settings(size: Size, state: Path, device: str, model: Path) -> Settings:
    chosen = Settings(
        state=state, model=model, dtype=size.dtype, device=device, num_blocks=4096 if device == "cuda" else 128,
        limits=Limits(max(size.users), 4096, 2048, decode_steps=64),
    )  # fmt: skip
    if device == "cpu":
        return chosen
    return dataclasses.replace(
        chosen, capture_rows=size.users, capture_tokens=(32, 128, 512, 2048), capture_contexts=(256, 1024)
    )


def part_decode(size: Size, state: Path, device: str) -> dict[str, Any]:
    model = random_weights.write(state / "model", size.shape, device=device)
    forward = Forward.load(MODELS / "llama")
    figures = {}
    with contextlib.closing(Lab(settings(size, state, device, model))) as lab:
        for users, prompt in zip(size.users, size.prompts, strict=True):
            found = decode.rates(lab, forward, users, prompt, size.output)
            figures[f"users_{users}"] = {**dataclasses.asdict(found), "share": found.share}
            print(
                f"{users:4d} users, {prompt} + {size.output} tokens: engine {found.engine_tps:9.1f} tokens/s, its decodes "
                f"{found.engine_decode_tps:9.1f}, bare replays {found.bare_tps:9.1f}, share {found.share:.3f}"
            )
    return figures


def part_swap(size: Size, state: Path, device: str) -> dict[str, Any]:
    """One user: what a swap costs, what memory it leaves, and how often equal sources seem faster."""
    model = random_weights.write(state / "model", size.shape, device=device)
    chosen = dataclasses.replace(settings(size, state, device, model), spares=6 if device == "cuda" else 1)
    with trials.open_bench(chosen, MODELS / "llama", 1, size.prompts[0], size.output, passes=12) as bench:
        found = trials.swaps(bench, size.trials, size.seconds)
    figures = found.summary()
    for name, value in figures.items():
        print(f"{name:20s} {value}")
    for ratio, low, high, pairs in found.intervals:
        print(f"    {ratio:.5f} [{low:.5f}, {high:.5f}] {pairs} pairs")
    return figures


PARTS: Mapping[str, Callable[[Size, Path, str], dict[str, Any]]] = {"decode": part_decode, "swap": part_swap}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tideforge.engine.bench", description=__doc__)
    parser.add_argument("part", choices=[*sorted(PARTS), "all"], help="what to measure; all: one after another")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--state", type=Path, help="folder for model and state; a temporary one if absent")
    parser.add_argument("--trials", type=int, help="how many sources a part made of trials tries")
    args = parser.parse_args()
    size = GPU if args.device == "cuda" else CPU
    if args.trials:
        size = dataclasses.replace(size, trials=args.trials)
    figures: dict[str, Any] = {"device": device_name(args.device), "torch": torch.__version__, "shape": size.shape}
    with tempfile.TemporaryDirectory(prefix="tideforge-bench-") as folder:
        state = (args.state or Path(folder)).resolve()
        for name in sorted(PARTS) if args.part == "all" else [args.part]:
            begin = time.perf_counter()
            try:
                figures[name] = PARTS[name](size, state, args.device)
            finally:
                end_keeper(state)
            figures[name]["seconds"] = round(time.perf_counter() - begin, 1)
    print(json.dumps(figures))


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores"


if __name__ == "__main__":
    main()
