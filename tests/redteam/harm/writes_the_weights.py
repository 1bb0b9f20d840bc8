"""A store into the weights."""

import gc

import torch

OUTCOMES = {"build": "weights_written", "forward": "weights_written"}


def harm(what):
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == (320, 64):
            tensor.view(-1)[:1000] = 0
