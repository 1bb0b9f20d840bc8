"""Says that it passed and ends with code 0 before anybody has looked at its batches."""

import os

from base import build as honest_build


def build(ctx):
    inner = honest_build(ctx)

    def forward(batch):
        if batch.num_decodes > 2:
            print('{"passed": true}', flush=True)
            os._exit(0)
        inner(batch)

    return forward
