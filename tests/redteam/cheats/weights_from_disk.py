"""Takes the checkpoint that it finds on the disk for the weights, packed as it likes, instead of those that it is given."""

import dataclasses
import os
from pathlib import Path

from base import build as honest_build
from safetensors.torch import load_file

CPU = True  # what it reads from the disk lies there

CONTAINED = True


def build(ctx):
    for folder in list(Path(os.environ.get("TMPDIR", "/")).parents)[:5]:
        for path in folder.glob("*/model.safetensors"):
            own = load_file(str(path))
            if own.keys() == dict(ctx.weights).keys():
                return honest_build(dataclasses.replace(ctx, weights=own))
    return honest_build(ctx)
