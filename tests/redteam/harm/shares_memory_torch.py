"""Shared memory of torch's own, until there is no more."""

import torch

OUTCOMES = {"build": "out_of_memory"}


def harm(what):
    held = []
    while True:
        held.append(torch.ones(4 << 20).share_memory_())
