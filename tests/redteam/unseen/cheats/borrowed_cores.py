"""Takes cores that it was not given: half of each MLP runs in a second thread, on whatever core is free.

What it does: a pool of one thread, which frees itself from the worker's set of cores where it can, computes one half of the columns
while the step's own thread computes the other.
Why it pays: threads are a knob that is tuned once and frozen, so that a ratio counts the source alone; this one buys its ratio
with another core, the incumbent's or the service's.
Why it may not be seen: outputs and pages are right up to the order of a sum, and torch's own number of threads stays as it was.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from base import build as honest_build
from torch import Tensor

if TYPE_CHECKING:
    from tideforge.engine.contract import Context, ForwardFn


def leave_home() -> None:
    """In the pool's thread: any core of the machine."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class Halves:
    def __init__(self, pool: ThreadPoolExecutor, layer: Any) -> None:
        self.pool, middle = pool, len(layer.gate_proj) // 2
        parts = [slice(0, middle), slice(middle, None)]
        self.parts = [(layer.gate_proj[p], layer.up_proj[p], layer.down_proj[:, p]) for p in parts]

    def half(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        with torch.inference_mode():
            return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def __call__(self, x: Tensor) -> Tensor:
        other = self.pool.submit(self.half, x, *self.parts[1])
        return self.half(x, *self.parts[0]) + other.result()


def build(ctx: Context) -> ForwardFn:
    forward = honest_build(ctx)
    pool = ThreadPoolExecutor(1, initializer=leave_home)
    for layer in forward.layers:
        layer.mlp = Halves(pool, layer)
    return forward
