"""Processes of the stack: only what was started is ended, and what is unreachable is named."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tideforge.errors import UserError
from tideforge.flows.cli import main
from tideforge.tasks import stack
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import check_mlflow

SLEEPER = [sys.executable, "-c", "import subprocess,time; subprocess.Popen(['sleep','300']); time.sleep(300)"]


def endpoint_file(folder: Path, **more: object) -> Path:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    path = folder / "e.yaml"
    path.write_text(yaml.safe_dump({**raw, "state": str(folder / "s"), **more}))
    return path


def test_down_ends_a_process_with_its_children_and_spares_a_reused_pid(tmp_path: Path) -> None:
    import psutil

    process = stack.spawn("sleeper", SLEEPER, tmp_path, os.environ)
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(process.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.alive and len(children) == 1
    stranger = dataclasses.replace(process, started=process.started - 100)
    assert not stack.stop(stranger) and process.alive
    stack.Stack("http://a:1", "http://a:2", "http://a:3", "e", (process,)).save(tmp_path)
    assert stack.down(tmp_path) == ["sleeper"]
    assert not process.alive and not children[0].is_running()
    assert stack.down(tmp_path) == []


def test_a_process_that_ends_while_starting_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    process = stack.spawn("server", command, tmp_path, os.environ, "http://127.0.0.1:9/")
    with pytest.raises(UserError, match=r"server: ended while starting \(no such model\); read .*server\.log"):
        stack.wait_ready(process, 30)


def test_taken_ports_are_avoided() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert stack.free_port(port) != port


def test_the_users_own_prefect_profile_is_not_used(tmp_path: Path) -> None:
    env = stack.environment(tmp_path)
    assert env["PREFECT_HOME"] == str(tmp_path / "prefect") and env["DO_NOT_TRACK"] == "true"


@pytest.mark.parametrize(
    ("extra", "named"),
    [({}, "Prefect at http://127.0.0.1:9/api"), ({"tracking_uri": "http://127.0.0.1:9"}, "MLflow at")],
)
def test_unreachable_servers_are_named_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: dict[str, str],
    named: str,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("PREFECT_API_URL", None)
    if not extra:
        os.environ["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    with pytest.raises(SystemExit) as stopped:
        main(["recompile", "--endpoint", str(endpoint_file(tmp_path, **extra))])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and named in lines[-1] and "does not answer" in lines[-1]
    assert not (tmp_path / "s" / "runs").exists()


def test_a_server_that_is_not_mlflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda url, timeout: httpx.Response(404))
    with pytest.raises(UserError, match="is not an MLflow server"):
        check_mlflow("http://127.0.0.1:5000")
    check_mlflow("sqlite:///x.db")


def test_the_demo_endpoint_is_valid_and_the_deployment_names_real_flows() -> None:
    root = Path(__file__).resolve().parents[2] / "deployments"
    endpoint = Endpoint.load(root / "endpoints" / "smollm2-cpu.yaml")
    assert len(endpoint.agents) == 2 and endpoint.budget.held_out_pairs >= 8
    found = yaml.safe_load((root / "prefect.yaml").read_text())["deployments"]
    assert {one["name"] for one in found} == {"nightly", "hourly"}
    assert all(one["concurrency_limit"] == 1 and one["work_pool"]["name"] == stack.POOL for one in found)
    trigger = next(one for one in found if one["name"] == "nightly")["triggers"][0]
    assert (
        trigger["expect"] == ["tideforge.drift.detected"] and "event.payload.reason" in trigger["parameters"]["reason"]
    )
