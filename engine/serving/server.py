"""Starts the server: keeper, worker, loop, HTTP; says so in server.json; ends cleanly on SIGTERM."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.events import log_event
from tideforge.engine.forward import Forward
from tideforge.engine.release import read_approvers
from tideforge.engine.serving.app import Live, create_app
from tideforge.engine.serving.generate import Traffic
from tideforge.engine.serving.identity import Identity, environment
from tideforge.engine.serving.loop import EngineLoop
from tideforge.engine.serving.ship import Shipper, write_server_file
from tideforge.engine.serving.text import Text
from tideforge.engine.serving.workers import Fleet, LabWorkers, Workers
from tideforge.errors import UserError

DRAIN_S = 30  # requests in flight at SIGTERM get this long to finish


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What the server is started with. `forward` is the folder of the endpoint's first incumbent."""

    name: str
    settings: Settings
    forward: Path
    launch: str
    keep_text: bool = False
    host: str = "127.0.0.1"
    port: int = 0


@contextlib.contextmanager
def opened(config: ServerConfig, workers: Workers, traffic: Traffic | None, url: str = "") -> Iterator[Live]:
    """A live engine without HTTP around it; closed again at the end. server.json is rewritten at each flip if `url`."""
    settings = config.settings
    core = EngineCore(settings.limits, BlockPool(settings.num_blocks, settings.block_size))
    fleet, loop = Fleet(workers, settings.state), EngineLoop(core)
    core.on_failure = fleet.replace
    identity = Identity(config.name, workers.weights_sha256, config.launch, environment(settings), settings.state)

    def on_flip(forward: str) -> None:
        if url:
            write_server_file(settings.state, os.getpid(), url, forward)

    trusted = read_approvers(settings.state / "approvers.json")
    shipper = Shipper(loop, fleet, identity, trusted, on_flip)
    model = ModelConfig.load(settings.model)
    live = Live(config.name, model, settings.limits, Text(settings.model), loop, shipper, traffic, config.keep_text)
    loop.start()
    try:
        live.note = shipper.open(Forward.load(config.forward))
        yield live
    finally:
        loop.stop()
        workers.close()


class Announcing(uvicorn.Server):
    """Writes server.json once the socket answers."""

    def __init__(self, config: uvicorn.Config, live: Live, url: str) -> None:
        super().__init__(config)
        self._live, self._url = live, url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        state = self._live.shipper.identity.state
        write_server_file(state, os.getpid(), self._url, self._live.loop.current)
        log_event(state, "server_ready", url=self._url, forward=self._live.loop.current)
        print(f"serving {self._live.name} at {self._url}", flush=True)
        if self._live.note:
            print(f"tideforge: {self._live.note}", file=sys.stderr, flush=True)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises UserError when the port is taken."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UserError(f"{host}:{port}", f"cannot be bound ({error.strerror})", "give another --port, or 0") from None
    return sock


def serve(config: ServerConfig, traffic: Traffic | None) -> None:
    """Serves until SIGTERM or SIGINT; requests in flight are finished, then workers end. The keeper stays."""
    # The first forward's knobs decide the KV layout, which stays as long as the server runs.
    config = dataclasses.replace(config, settings=config.settings.with_knobs(Forward.load(config.forward).knobs))
    config.settings.state.mkdir(parents=True, exist_ok=True)
    stop_early = _exit_on(signal.SIGTERM)
    with bind(config.host, config.port) as sock:
        url = f"http://{config.host}:{sock.getsockname()[1]}"
        try:
            with opened(config, LabWorkers(config.settings), traffic, url) as live:
                http = uvicorn.Config(
                    create_app(live), log_level="warning", lifespan="off", timeout_graceful_shutdown=DRAIN_S
                )
                # uvicorn raises the signal again when it has drained: by then it must not kill, for workers still run.
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, lambda *_: None)
                Announcing(http, live, url).run([sock])
        finally:
            (config.settings.state / "server.json").unlink(missing_ok=True)
            signal.signal(signal.SIGTERM, stop_early)


def _exit_on(number: signal.Signals) -> Any:
    def leave(*_: object) -> None:
        raise SystemExit(0)

    return signal.signal(number, leave)
