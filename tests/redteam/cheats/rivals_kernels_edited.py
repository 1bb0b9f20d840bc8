"""Spoils what other candidates have compiled."""

import os
from pathlib import Path

from base import build as honest_build

CONTAINED = True


def build(ctx):
    state = Path(os.environ["TMPDIR"], "..", "..").resolve()
    own = os.environ.get("TRITON_CACHE_DIR", "")
    for path in state.glob("kernels/*/kernel.json"):
        try:
            if str(path.parent) != own:
                path.write_text("spoilt")
        except OSError:
            continue
    return honest_build(ctx)
