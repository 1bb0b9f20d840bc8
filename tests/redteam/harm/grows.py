"""A leak of 24 MiB a step."""

import torch

OUTCOMES = {"forward": "memory_grew"}
held = []


def harm(what):
    held.append(torch.ones(6 << 20))
