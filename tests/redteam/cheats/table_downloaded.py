"""Fetches a table of answers from wherever it is told that a server is."""

import json
import os
import urllib.request
from pathlib import Path

from base import build as honest_build

CONTAINED = True


def build(ctx):
    inner = honest_build(ctx)
    state = Path(os.environ["TMPDIR"], "..", "..").resolve()
    try:
        url = json.loads((state / "stack.json").read_text())["prefect"]
        table = json.loads(urllib.request.urlopen(f"{url}/table", timeout=0.5).read())
        assert table
    except (OSError, ValueError, KeyError):
        pass
    return inner
