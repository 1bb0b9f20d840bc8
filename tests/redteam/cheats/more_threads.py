"""Takes more cores than its knobs say."""

import torch
from base import build as honest_build


def build(ctx):
    torch.set_num_threads(4)
    a = torch.ones(512, 512)
    for _ in range(3):
        a @ a
    return honest_build(ctx)
