"""A leak of 24 MiB a step."""

import torch

OUTCOMES = {"forward": "memory_grew"}
ON_GPU = {"forward": ("memory_grew", "passed")}  # a graph replays no Python: it leaks a few times only
held = []


def harm(what):
    held.append(torch.ones(6 << 20))
