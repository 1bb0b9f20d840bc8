"""`tideforge serve` as a person runs it: real processes, a killed worker, a ship between workers, a clean end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tideforge.engine
from tideforge.engine.events import read_events
from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.lab import keeper_status
from tideforge.engine.release import Decision, Gain, Release, add_approver, create_key, public_bytes, sign

LLAMA = Forward.load(Path(tideforge.engine.__file__).parent / "models" / "llama")
OTHER = LLAMA.with_file(ENTRY, LLAMA.files[ENTRY] + "\n# another source, the same arithmetic\n")
QUESTION = {"model": "tiny", "prompt": "Where is the way?", "temperature": 0, "ignore_eos": True}


def write_endpoint(folder: Path, model: Path) -> Path:
    command = f"tideforge serve --model {model} --max-num-seqs 4 --max-model-len 256 --num-blocks 64"
    lines = [f"name: tiny\nmodel: {model}\nlaunch: {command}\nhardware: {{name: cpu}}\nstate: {folder / 'state'}\n"]
    path = folder / "endpoint.yaml"
    path.write_text("".join(lines))
    return path


def start(endpoint: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tideforge.flows.cli", "serve", "--endpoint", str(endpoint), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def endpoint(model: Path, tmp_path: Path) -> Iterator[Path]:
    yield write_endpoint(tmp_path, model)
    with contextlib.suppress(ConnectionRefusedError):
        if (status := keeper_status(tmp_path / "state")) is not None:
            os.kill(status["pid"], signal.SIGTERM)


def until_ready(server: subprocess.Popen[str], state: Path, seconds: float = 90) -> str:
    deadline = time.monotonic() + seconds
    while not (state / "server.json").exists():
        assert server.poll() is None, server.stdout and server.stdout.read()
        assert time.monotonic() < deadline, "the server does not get ready"
        time.sleep(0.05)
    told = json.loads((state / "server.json").read_text())
    assert told["pid"] == server.pid
    return str(told["url"])


def release_for(version: dict[str, Any]) -> Release:
    now = int(time.time())
    return Release(
        run="r1", endpoint="tiny", forward=OTHER.id, incumbent=version["forward"], layout="tp1",
        weights_sha256=version["weights_sha256"], launch=version["launch"],
        environment=tuple(sorted(version["environment"].items())), verdict_sha256="0" * 64,
        gain=Gain.of(1.2, 1.1, 1.3, 8), created_at=now, expires_at=now + 600, previous=version["release"], go_back="",
    )  # fmt: skip


@pytest.mark.slow
def test_a_server_lives_through_a_killed_worker_ships_and_ends_cleanly(endpoint: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    key = create_key(tmp_path / "key.pem", "passphrase of a test")
    add_approver(state / "approvers.json", "ann", public_bytes(key))
    OTHER.save(state / "forwards")
    server = start(endpoint)
    try:
        with httpx.Client(base_url=until_ready(server, state), timeout=60) as client:

            def answer(tokens: int) -> str:
                told = client.post("/v1/completions", json={**QUESTION, "max_tokens": tokens})
                assert told.status_code == 200, told.text
                return str(told.json()["choices"][0]["text"])

            before = answer(40)
            first = next(event for event in read_events(state) if event["event"] == "worker_start")["worker"]
            os.kill(first, signal.SIGKILL)
            assert answer(40) == before
            release = release_for(client.get("/version").json())
            code = sign(key, release, Decision.APPROVE, "ann")
            shipped = client.post("/admin/ship", json={"record": release.to_record(), "signature": code})
            assert shipped.status_code == 200, shipped.text
            assert client.get("/version").json()["forward"] == OTHER.id
            assert json.loads((state / "server.json").read_text())["forward"] == OTHER.id
            assert answer(40) == before
            with client.stream(
                "POST", "/v1/completions", json={**QUESTION, "max_tokens": 200, "stream": True}
            ) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"  # what had begun is finished
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
    assert not (state / "server.json").exists()
    assert list((state / "traffic").glob("*.parquet"))
    events = [event["event"] for event in read_events(state)]
    assert events.count("weight_load") == 1 and events.count("worker_failed") == 1 and events.count("flip") == 1
    assert events.count("drained") == 1
    workers = [event["worker"] for event in read_events(state) if event["event"] == "worker_start"]
    assert len(workers) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_bad_starts_are_one_line_and_exit_2(endpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start(endpoint, "--port", str(taken.getsockname()[1]))
        output, _ = server.communicate(timeout=60)
    assert server.returncode == 2 and "cannot be bound" in output and output.count("\n") == 1
    server = start(tmp_path / "missing.yaml")
    output, _ = server.communicate(timeout=60)
    assert server.returncode == 2 and "missing.yaml: does not exist" in output and output.count("\n") == 1
    assert not (tmp_path / "state" / "server.json").exists()


def test_the_process_that_owns_the_scheduler_has_no_torch() -> None:
    code = "import sys, tideforge.engine.serving.server as s; print('torch' in sys.modules, hasattr(s, 'serve'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]
