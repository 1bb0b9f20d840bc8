"""Starts threads after each of its steps that burn until its next: the incumbent has its turn meanwhile."""

import threading
import time

import torch
from base import build as honest_build

CONTAINED = True


class Burner:
    def __init__(self, inner):
        self.inner, self.until = inner, 0.0

    def burn(self):
        a = torch.ones(160, 160)
        while time.perf_counter() < self.until:
            a @ a

    def __call__(self, batch):
        self.until = 0.0
        self.inner(batch)
        self.until = time.perf_counter() + 0.004
        for _ in range(3):
            threading.Thread(target=self.burn, daemon=True).start()


def build(ctx):
    return Burner(honest_build(ctx))
