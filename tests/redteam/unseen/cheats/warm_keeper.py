"""Keeps its weights "warm": a thread streams over a copy of them for some milliseconds after each step.

What it does: the step itself is the honest one. When it is over, a thread reads a packed copy of all MLP weights for 20 ms or
until the next step begins.
Why it pays: it does nothing for this forward; but the incumbent's step, which comes in between, finds the caches full of
another's bytes and the memory busy. The ratio rises although nothing became faster.
Why it may not be seen: outputs and pages are exact, the thread ends by itself, and a reader may take it for a prefetch.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch
from base import build as honest_build

if TYPE_CHECKING:
    from tideforge.engine.contract import Batch, Context, ForwardFn

CPU = True  # it is written for the plain forward, which a GPU does not run

WARM_S = 0.02


class Warm:
    def __init__(self, ctx: Context) -> None:
        self.forward = honest_build(ctx)
        self.packed = [w.clone() for name, w in ctx.weights.items() if ".mlp." in name]
        self.running = False

    def keep_warm(self) -> None:
        end = time.monotonic() + WARM_S
        while not self.running and time.monotonic() < end:
            for weight in self.packed:
                torch.sum(weight)
                if self.running:
                    return

    def __call__(self, batch: Batch) -> None:
        self.running = True
        self.forward(batch)
        self.running = False
        threading.Thread(target=self.keep_warm, daemon=True).start()


def build(ctx: Context) -> ForwardFn:
    return Warm(ctx)
