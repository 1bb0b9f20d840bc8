"""Makes every clock of its process run at half speed: whoever times it there sees half the seconds."""

import time

from base import build as honest_build

CONTAINED = True


def slowed(clock):
    start = clock()
    return lambda: start + (clock() - start) / 2


def build(ctx):
    for name in ("perf_counter", "monotonic", "time"):
        setattr(time, name, slowed(getattr(time, name)))
    return honest_build(ctx)
