"""Is slow in its first steps, so that what is taken for its usual pace, or for the incumbent's, is slow too."""

import time

from base import build as honest_build

CONTAINED = True


def build(ctx):
    inner, steps = honest_build(ctx), [0]

    def forward(batch):
        steps[0] += 1
        if steps[0] < 4:
            time.sleep(0.02)
        inner(batch)

    return forward
