"""A live server over the tiny model, in this process: real HTTP on loopback, no worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

import tideforge.engine
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.local import LocalWorkers
from tideforge.engine.serving.app import Live, create_app
from tideforge.engine.serving.server import ServerConfig, bind, opened

LLAMA = Path(tideforge.engine.__file__).parent / "models" / "llama"


@dataclasses.dataclass
class Rows:
    """Stands where the traffic log stands, and keeps what it is given."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


@dataclasses.dataclass
class Served:
    live: Live
    url: str
    traffic: Rows
    workers: LocalWorkers

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    @property
    def blocks_held(self) -> int:
        pool = self.live.loop.core.pool
        return pool.capacity - pool.num_free


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_llama(tmp_path_factory.mktemp("model"))


Serve = Callable[..., contextlib.AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def serve_at(model: Path) -> Serve:
    """`serve_at(state, **changes of ServerConfig)` as a context manager."""

    @contextlib.contextmanager
    def at(state: Path, **changes: Any) -> Iterator[Served]:
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=192)
        settings = Settings(state=state, model=model, limits=limits, block_size=8, num_blocks=128)
        config = ServerConfig("tiny", settings, LLAMA, "tideforge serve --endpoint tiny.yaml")
        config = dataclasses.replace(config, **changes)
        traffic, workers = Rows(), LocalWorkers(settings)
        with bind("127.0.0.1", 0) as sock:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            with opened(config, workers, traffic, url) as live:
                http = uvicorn.Server(uvicorn.Config(create_app(live), log_level="warning", lifespan="off"))
                thread = threading.Thread(target=http.run, kwargs={"sockets": [sock]})
                thread.start()
                try:
                    yield Served(live, url, traffic, workers)
                finally:
                    http.should_exit = True
                    thread.join(20)
                    assert not thread.is_alive()

    return at


@pytest.fixture(scope="module")
def served(serve_at: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_at(tmp_path_factory.mktemp("state")) as one:
        yield one
