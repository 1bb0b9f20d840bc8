"""The demo on the tiny endpoint through real servers: Prefect, MLflow, the HTTP server, a worker, a deployment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tideforge.tasks import stack
from tideforge.tasks.endpoint import Endpoint


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_whole_night_through_the_deployment(tiny_endpoint: Path) -> None:
    endpoint = Endpoint.load(tiny_endpoint)
    python = [sys.executable, "-m", "tideforge.flows.cli"]
    command = [*python, "demo", "--endpoint", str(tiny_endpoint), "--approve", "yes"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        facts = json.loads(done.stdout.splitlines()[-1])
        assert (facts["service_starts"], facts["weight_loads"]) == (1, 1)
        assert facts["failed_requests"] == (0 if facts["shipped"] else None)
        assert facts["candidates"] == sum(facts["outcomes"].values()) > 0
        servers = stack.Stack.read(endpoint.state)
        assert servers is not None and len(servers.processes) == 4
        serving = httpx.get(f"{servers.server}/version", timeout=10).json()["forward"]
        assert serving == (facts["shipped"] or facts["served"])
        again = subprocess.run(
            [*python, "report", facts["run"], "--endpoint", str(tiny_endpoint), "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert json.loads(again.stdout.splitlines()[-1]) == facts
        drift = [*python, "demo-drift", "--endpoint", str(tiny_endpoint)]
        shifted = subprocess.run(drift, capture_output=True, text=True, timeout=600, check=False)
        assert shifted.returncode == 0, shifted.stderr[-3000:]
        assert json.loads(shifted.stdout.splitlines()[-1])["reason"].startswith("drift: ")
    finally:
        subprocess.run([*python, "down", "--endpoint", str(tiny_endpoint)], timeout=120, check=False, env=os.environ)
    assert not any(process.alive for process in servers.processes)
