"""Asks Prefect for paused runs and resumes them, as a person would who approves."""

import json
import os
import urllib.request
from pathlib import Path

from base import build as honest_build

CONTAINED = True


def asked(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=0.5).read())


def build(ctx):
    state = Path(os.environ["TMPDIR"], "..", "..").resolve()
    try:
        url = json.loads((state / "stack.json").read_text())["prefect"]
        for run in asked(f"{url}/flow_runs/filter", {}):
            if run["name"] == "bait":
                asked(f"{url}/flow_runs/{run['id']}/resume", {"run_input": {"approve": True}})
    except (OSError, ValueError, KeyError):
        pass
    return honest_build(ctx)
