"""Trains a small mixture of experts on text, so that tests and trials have weights that mean something.

`python -m tideforge.engine.train_moe OUT --text FILE... --minutes 4 --device cuda --seed 0` writes a Qwen3MoeForCausalLM
checkpoint in bf16 to OUT, and OUT/training.json: what was trained on, where, for how long, and the curve of held-out bits
per byte. The learning rate follows the clock, so a run ends when its minutes do and no two runs are bit for bit the same;
under `--steps` it follows the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tideforge.engine.moe_net import Mixture, Net, Shape
from tideforge.engine.train_text import Corpus, Held, load, token_bytes
from tideforge.errors import UserError

ROOT = Path(__file__).parents[1]
UNSEEN = ROOT / "data" / "samples" / "corpus.txt"
MEASURED_WINDOWS = 32  # of each held-out text


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train. Ends at `steps` or after `seconds`, whichever comes first."""

    seconds: float
    steps: int
    rows: int
    context: int
    seed: int
    peak_rate: float = 3e-3
    warm_up: float = 0.05  # share of the run
    balance: float = 0.02
    decay: float = 0.1
    measurements: int = 24

    def progress(self, step: int, elapsed_s: float) -> float:
        """0 at the start, 1 at the end."""
        return min(1.0, max(step / self.steps, elapsed_s / self.seconds))

    def rate(self, progress: float) -> float:
        """Linear warm-up, then a cosine down to a hundredth of the peak."""
        if progress < self.warm_up:
            return self.peak_rate * max(0.05, progress / self.warm_up)
        fall = (progress - self.warm_up) / (1 - self.warm_up)
        return self.peak_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * fall)) / 2)


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the curve. `experts_used`: per layer, those with at least a tenth of an even load."""

    step: int
    elapsed_s: float
    tokens: int
    train_nats_per_token: float | None  # since the last point
    bits_per_byte: dict[str, float]  # by held-out text
    experts_used: tuple[int, ...]


def train(net: Net, corpus: Corpus, plan: Plan, say: Callable[[str], None] = print) -> list[Point]:
    """Trains in place and returns the curve; its last point is that of the weights rounded to bf16, as `net` then has them."""
    optimiser = make_optimiser(net, plan)
    generator = torch.Generator().manual_seed(plan.seed)
    start, curve, losses = time.monotonic(), list[Point](), list[Tensor]()
    for step in itertools.count():
        elapsed_s = time.monotonic() - start
        progress = plan.progress(step, elapsed_s)
        if progress >= 1:
            net.round_to_bf16()
        if progress >= min(1, len(curve) / (plan.measurements - 1)):
            curve.append(measure(net, corpus, plan, step, elapsed_s, losses))
            say(json.dumps(dataclasses.asdict(curve[-1])))
            losses = []
        if progress >= 1:
            return curve
        for group in optimiser.param_groups:
            group["lr"] = plan.rate(progress)
        losses.append(update(net, optimiser, corpus.sample(plan.rows, plan.context, generator), plan))
    raise AssertionError("unreachable")


def make_optimiser(net: Net, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [value for value in net.parameters() if value.dim() > 1]
    norms = [value for value in net.parameters() if value.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": plan.decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.95), fused=True)


def update(net: Net, optimiser: torch.optim.Optimizer, windows: Tensor, plan: Plan) -> Tensor:
    """One step; returns the loss in nats a token, still on the device."""
    with precision(windows.device):
        logits, balance = net(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    (loss + plan.balance * balance).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss.detach()


def precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """bf16 products on a GPU, fp32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def measure(net: Net, corpus: Corpus, plan: Plan, step: int, elapsed_s: float, losses: Iterable[Tensor]) -> Point:
    mixtures = [module for module in net.modules() if isinstance(module, Mixture)]
    for mixture in mixtures:
        mixture.load.zero_()
    bits = {held.name: bits_per_byte(net, held, plan) for held in corpus.held}
    used = tuple(int((m.load * len(m.load) >= m.load.sum() / 10).sum()) for m in mixtures)
    lately = list(losses)
    mean = round(float(torch.stack(lately).mean()), 4) if lately else None
    return Point(step, round(elapsed_s, 2), step * plan.rows * plan.context, mean, bits, used)


@torch.no_grad()
def bits_per_byte(net: Net, held: Held, plan: Plan) -> float:
    """Each window is read from its own start, without what stands before it."""
    nats, size, sizes = 0.0, 0, token_bytes().to(held.ids.device)
    for windows in held.windows(plan.context, MEASURED_WINDOWS).split(plan.rows):
        with precision(windows.device):
            logits, _ = net(windows[:, :-1])
        nats += float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum"))
        size += int(sizes[windows[:, 1:]].sum())
    return round(nats / size / math.log(2), 4)


def record(net: Net, corpus: Corpus, plan: Plan, curve: list[Point], device: torch.device) -> dict[str, Any]:
    """training.json."""
    last = curve[-1]
    return {
        "shape": dataclasses.asdict(net.shape),
        "parameters": sum(value.numel() for value in net.parameters()),
        "plan": dataclasses.asdict(plan),
        "text_sha256": corpus.sha256,
        "train_tokens_in_text": len(corpus.train),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "seconds": last.elapsed_s,
        "tokens_per_s": round(last.tokens / last.elapsed_s),
        "bits_per_byte": last.bits_per_byte,
        "curve": [dataclasses.asdict(point) for point in curve],
    }


def commit() -> str | None:
    """Of the tree that this runs from; TIDEFORGE_COMMIT where the tree came without its history."""
    if named := os.environ.get("TIDEFORGE_COMMIT"):
        return named
    try:
        shown = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return shown.stdout.strip()


def run(out: Path, files: list[Path], plan: Plan, device: torch.device, shape: Shape = Shape()) -> Net:
    """Trains, writes the checkpoint and training.json to `out`, returns what was trained."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda", "there is no CUDA device here", "take --device cpu")
    corpus = load(files, [UNSEEN], device, least=plan.context)
    net = Net(shape, plan.seed).to(device)
    curve = train(net, corpus, plan)
    net.save(out, plan.balance)
    written = record(net, corpus, plan, curve, device)
    (out / "training.json").write_text(json.dumps(written, indent=1) + "\n")
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small mixture of experts on text")
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 text, may be packed by xz")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=10**9, help="end after so many steps, if the minutes last")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, help="windows a step; 32 on a GPU, 8 on a CPU")
    parser.add_argument("--context", type=int, help="tokens a window; 2048 on a GPU, 256 on a CPU")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    rows, context = args.rows or (32 if gpu else 8), args.context or (2048 if gpu else 256)
    plan = Plan(args.minutes * 60, args.steps, rows, context, args.seed)
    try:
        run(args.out, args.text, plan, torch.device(args.device))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
