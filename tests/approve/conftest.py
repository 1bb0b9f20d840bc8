"""A verified night on disk, an approver with a key, and the real server over a tiny model, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

import tideforge.engine
from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import release as rel
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.events import log_event
from tideforge.engine.forward import Forward
from tideforge.engine.local import LocalWorkers
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.engine.serving.app import Live, create_app
from tideforge.engine.serving.server import ServerConfig, bind, opened
from tideforge.tasks.approve import prepare_release
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Run
from tideforge.tasks.verify.plan import required

LAUNCH = "tideforge serve --endpoint tiny.yaml"
LLAMA = Path(tideforge.engine.__file__).parent / "models" / "llama"
WHO, PASSPHRASE = "Ann Other", "correct horse"


@dataclasses.dataclass
class Place:
    """One endpoint with its server, and the key of its one approver. `live` is the server's own view."""

    endpoint: Endpoint
    live: Live
    url: str
    key: Any

    @property
    def state(self) -> Path:
        return self.endpoint.state

    @property
    def serving(self) -> str:
        return str(self.live.loop.current)

    def candidate(self, mark: str) -> Forward:
        """Another source for the same arithmetic, staged as a search leaves it."""
        first = Forward.load(LLAMA)
        forward = first.with_file("forward.py", first.files["forward.py"] + f"\n# {mark}\n")
        forward.save(self.state / "forwards")
        return forward

    def night(self, run_id: str, said: Mapping[str, Any] | None = None) -> Run:
        """The run folder of a night whose finalist passed; `said` changes what verification said."""
        forward = self.candidate(run_id)
        run = Run.create(self.state / "runs", run_id)
        stored = run.write_json("endpoint", self.endpoint.model_dump(mode="json"))
        run.finish("run", {"endpoint": stored.sha256}, {"endpoint": stored}, {"endpoint": self.endpoint.name})
        work = Workload(
            users=4, search=(), held_out=(RequestShape(8, 6),) * 4, corpus=tuple(range(3, 203)), profile="", seed=1
        )
        workload = run.write_json("workload", json.loads(work.to_json()))
        run.finish("workload", {}, {"workload": workload})
        search = {"finalist": forward.id, "incumbent": self.serving, "served": self.serving}
        (run.folder / "tuned.json").write_text(json.dumps({"served": self.serving, "incumbent": self.serving}))
        (run.folder / "noise.json").write_text(json.dumps({"log_ratios": []}))
        log_event(run.folder, "service_start")
        run.finish("search", {}, {"trials": run.write_json("trials", [winner(run, forward)])}, search)
        verdict: dict[str, Any] = {
            "forward": forward.id, "incumbent": self.serving, "passed": True, "ratio": 1.31, "ci_low": 1.2, "ci_high": 1.4,
            "gates": [{"name": name, "passed": True, "evidence": "", "figures": {"bound": 0.1}} for name in sorted(required())],
            "pairs": [[100.0, 131.0]] * 8, "ttft_ms": 9.0, "tps_per_user_p50": 9.0, "tps_per_user_p90": 8.0,
            "weights_sha256": self.live.shipper.identity.weights_sha256, "environment": {},
        }  # fmt: skip
        output = run.write_json("verdict", {**verdict, **(said or {})})
        run.finish("verify", {"finalist": forward.id}, {"verdict": output}, {"passed": True})
        return run

    def waiting(self, run_id: str) -> Run:
        run = self.night(run_id)
        prepare_release(run, self.endpoint)
        return run

    def code(self, release: rel.Release, decision: rel.Decision = rel.Decision.APPROVE) -> str:
        return rel.sign(self.key, release, decision, WHO)


def winner(run: Run, forward: Forward) -> dict[str, Any]:
    """The trial that made this forward the finalist, in the archive; as the search lists it."""
    figures = Figures(1.3, 1.2, 1.4, 8, 130.0, 100.0, 9.0, 9.0, 8.0)
    trial = Trial("000000-a", forward.id, "slow", "offline-1", 1.0, Outcome.PASSED, "", figures, finished_at=2.0)
    (run.folder / "trials" / trial.id).mkdir(parents=True)
    (run.folder / "trials" / trial.id / "result.json").write_text(trial.to_json())
    return dict(json.loads(trial.to_json()))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Made once: opening an encrypted key takes a moment on purpose."""
    path = tmp_path_factory.mktemp("home") / "approver.pem"
    return path, rel.create_key(path, PASSPHRASE)


@pytest.fixture
def place(tmp_path: Path, model: Path, key: tuple[Path, Any]) -> Iterator[Place]:
    state = tmp_path / "state"
    state.mkdir()
    rel.add_approver(state / "approvers.json", WHO, rel.public_bytes(key[1]))
    endpoint = Endpoint.model_validate(
        {"name": "tiny", "model": model, "launch": LAUNCH, "hardware": {"name": "cpu"}, "state": state}
    )
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=192)
    settings = Settings(state=state, model=model, limits=limits, block_size=8, num_blocks=256)
    with serving(ServerConfig("tiny", settings, LLAMA, LAUNCH)) as (live, url):
        yield Place(endpoint, live, url, key[1])


@contextlib.contextmanager
def serving(config: ServerConfig) -> Iterator[tuple[Live, str]]:
    with bind("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with opened(config, LocalWorkers(config.settings), None, url) as live:
            (config.settings.state / "server.json").write_text(json.dumps({"url": url, "forward": live.loop.current}))
            http = uvicorn.Server(uvicorn.Config(create_app(live), log_level="warning", lifespan="off"))
            thread = threading.Thread(target=http.run, kwargs={"sockets": [sock]})
            thread.start()
            try:
                deadline = time.monotonic() + 20
                while not http.started and time.monotonic() < deadline:
                    time.sleep(0.01)
                yield live, url
            finally:
                http.should_exit = True
                thread.join(20)
                assert not thread.is_alive()
