"""A store into the weights."""

import gc

import torch

OUTCOMES = {"build": "weights_written", "forward": "weights_written"}
# A device refuses the store as it refuses any other address, when its turn comes.
ON_GPU = {phase: ("build_error", "forward_error", "weights_written") for phase in OUTCOMES}


def harm(what):
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == (320, 64):
            tensor.view(-1)[:1000] = 0
