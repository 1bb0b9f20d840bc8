"""Trials on a bench: sources that differ, submitted one after another, and what each swap, reading and byte cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import measure
from tideforge.engine.config import Settings
from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.service_config import ServiceConfig

KERNEL = '''"""SwiGLU as one kernel."""

import torch
import triton
import triton.language as tl


@triton.jit
def _swiglu_{index}(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    silu = (g / (1 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (silu * u).to(out.dtype.element_ty), mask=at < count)


def swiglu(gate, up):
    out = torch.empty_like(gate)
    _swiglu_{index}[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), 1024)
    return out
'''


@contextlib.contextmanager
def open_bench(
    settings: Settings, incumbent: Path, users: int, prompt: int, output: int, passes: int
) -> Iterator[Bench]:
    """A bench over random token ids; its settings ask for no tuning of knobs."""
    state = settings.state
    vocabulary = json.loads((settings.model / "config.json").read_text())["vocab_size"]
    corpus = tuple(np.random.default_rng(1).integers(3, vocabulary, 4 * (prompt + 1000)).tolist())
    shapes = (RequestShape(prompt, output),) * users
    workload = Workload(users, shapes, shapes, corpus, profile="", seed=0)
    (state / "workload.json").write_text(workload.to_json())
    config = ServiceConfig(
        settings,
        state,
        incumbent,
        state / "workload.json",
        passes=passes,
        trial_s=30,
        allow_imports=("swiglu",),
        tune=False,
        noise_trials=0 if settings.device == "cpu" else 8,
    )
    with contextlib.closing(Bench(config)) as bench:
        yield bench


def variant(plain: Forward, index: int, new_kernel: bool) -> Forward:
    """The same arithmetic as another source; with `new_kernel` a Triton kernel that no cache holds does a part of it."""
    text = plain.files["forward.py"] + f"\n\n# variant {index}\n"
    if not new_kernel:
        return plain.with_file("forward.py", text)
    text, count = re.subn(
        r"F\.silu\(F\.linear\(x, self\.gate_proj\)\) \* F\.linear\(x, self\.up_proj\)",
        "swiglu(F.linear(x, self.gate_proj), F.linear(x, self.up_proj))",
        text,
    )
    if count != 1:
        raise ValueError("the raw forward's MLP is not where this benchmark looks for it")
    text = text.replace("from torch import Tensor\n", "from torch import Tensor\n\nfrom swiglu import swiglu\n", 1)
    return plain.with_file("forward.py", text).with_file("swiglu.py", KERNEL.format(index=index))


def evaluate(bench: Bench, forward: Forward) -> Trial:
    return bench.evaluate(Trial("bench", forward.id, "slow", "bench", time.time()), forward)


@dataclasses.dataclass(frozen=True)
class Swaps:
    """Seconds from a candidate's turn to its first timed step; whole trials; the keeper's device memory before and after."""

    plain_s: tuple[float, ...]
    kernel_s: tuple[float, ...]
    trial_s: tuple[float, ...]
    parts_s: dict[str, float]  # medians
    intervals: tuple[tuple[float, float, float, int], ...]  # ratio, low, high, pairs: of equal arithmetic
    memory_mib: tuple[float, ...]  # in use on the device after each trial, all processes
    outcomes: dict[str, int]

    def summary(self) -> dict[str, Any]:
        half = len(self.memory_mib) // 2
        slope = float(np.polyfit(range(half), self.memory_mib[-half:], 1)[0]) if half > 1 else 0.0
        return {
            "plain_p50_s": _quantile(self.plain_s, 0.5), "plain_p99_s": _quantile(self.plain_s, 0.99),
            "kernel_p50_s": _quantile(self.kernel_s, 0.5), "kernel_p99_s": _quantile(self.kernel_s, 0.99),
            "trial_p50_s": _quantile(self.trial_s, 0.5), "trials_an_hour": 3600 * len(self.trial_s) / sum(self.trial_s),
            "parts_s": self.parts_s, "false_wins": sum(low > 1 for _, low, _, _ in self.intervals), "trials": len(self.trial_s),
            "ratio_spread": float(np.std([np.log(ratio) for ratio, *_ in self.intervals])),
            "half_width_p50": _quantile(tuple((high - low) / 2 for _, low, high, _ in self.intervals), 0.5),
            "memory_mib_first": self.memory_mib[0], "memory_mib_last": self.memory_mib[-1],
            "memory_mib_a_trial": slope, "outcomes": self.outcomes,
        }  # fmt: skip


def _quantile(values: tuple[float, ...], share: float) -> float | None:
    return measure.percentile(values, share) if values else None


def swaps(bench: Bench, count: int, seconds: float) -> Swaps:
    """Up to `count` different sources, every third with a new kernel, for at most `seconds`."""
    done: list[tuple[bool, Trial, float]] = []
    memory, deadline = [], time.monotonic() + seconds
    while len(done) < count and time.monotonic() < deadline:
        index, begin = len(done), time.perf_counter()
        kernel = bench.lab.settings.device != "cpu" and index % 3 == 2
        trial = evaluate(bench, variant(bench.incumbent, index, kernel))
        done.append((kernel, trial, time.perf_counter() - begin))
        memory.append(device_memory_mib())
    passed = [(kernel, trial) for kernel, trial, _ in done if trial.outcome is Outcome.PASSED]
    parts = ("stage_s", "check_s", "capture_s", "swap_s", "clock_s")
    return Swaps(
        tuple(trial.swap_s for kernel, trial in passed if not kernel),
        tuple(trial.swap_s for kernel, trial in passed if kernel),
        tuple(seconds for _, _, seconds in done),
        {part: measure.percentile([getattr(trial, part) for _, trial in passed], 0.5) for part in parts}
        if passed
        else {},
        tuple((f.ratio, f.ci_low, f.ci_high, f.pairs) for _, trial in passed if (f := trial.figures)),
        tuple(memory),
        {str(trial.outcome): sum(t.outcome is trial.outcome for _, t, _ in done) for _, trial, _ in done},
    )


def device_memory_mib() -> float:
    """In use on the first GPU, by whatever process; 0.0 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / (1 << 20)
