"""The same by torch, whose host allocator raises a plain RuntimeError."""

import torch

OUTCOMES = {"build": "out_of_memory"}


def harm(what):
    held = []
    while True:
        held.append(torch.ones(4 << 20))
