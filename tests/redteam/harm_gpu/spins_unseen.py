"""A kernel without an end that nobody waits for before the first answer."""

import torch

OUTCOMES = {"forward": "hung"}


def harm(what):
    torch.cuda._sleep(1 << 60)
