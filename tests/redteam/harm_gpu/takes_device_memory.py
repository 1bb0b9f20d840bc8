"""All the device memory that can be had."""

import torch

OUTCOMES = {"build": "out_of_memory", "forward": "out_of_memory"}
held = []


def harm(what):
    while True:
        held.append(torch.zeros(1 << 30, dtype=torch.uint8, device="cuda"))
