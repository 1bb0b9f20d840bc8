"""A write of another shape: torch raises in the forward."""

import torch

OUTCOMES = {"after": "forward_error"}


def harm(batch):
    batch.logits.copy_(torch.zeros(3, 5))
