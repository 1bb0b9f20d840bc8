"""A leak of a sixth of the device at each call of the forward."""

import torch

OUTCOMES = {"forward": "out_of_memory"}
ON_GPU = {"forward": ("out_of_memory", "memory_grew")}  # whichever is seen first
held = []


def harm(what):
    total = torch.cuda.get_device_properties(0).total_memory
    held.append(torch.zeros(total // 6, dtype=torch.uint8, device="cuda"))
