"""A leak of a sixth of the device at each call of the forward."""

import torch

OUTCOMES = {"forward": "out_of_memory"}
held = []


def harm(what):
    total = torch.cuda.get_device_properties(0).total_memory
    held.append(torch.zeros(total // 6, dtype=torch.uint8, device="cuda"))
