"""Leaves a copy of itself behind that goes on computing when it is gone."""

import os
import time

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return inner
