"""An assertion on the device."""

import torch

OUTCOMES = {"forward": "forward_error"}


def harm(batch):
    batch.logits[torch.full((4,), 1 << 40, device=batch.logits.device)] = 0
    torch.cuda.synchronize()
