"""A lab: how an authority (service, verifier, HTTP server) gets memory, workers, the reference and the clock.

It runs no candidate code and imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tideforge
from tideforge.engine import procfs, protocol
from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.digests import Plane
from tideforge.engine.events import log_event
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import Forward
from tideforge.engine.keepers import LANE as LANE
from tideforge.engine.keepers import START_TIMEOUT_S, connect_keeper
from tideforge.engine.keepers import end_keeper as end_keeper
from tideforge.engine.keepers import keeper_folders as keeper_folders
from tideforge.engine.keepers import keeper_status as keeper_status
from tideforge.engine.kernels import copy_kernels
from tideforge.engine.memory import Arena
from tideforge.engine.sandbox import REQUIRE, Places, sandbox_for
from tideforge.engine.spawn import Nursery, sweep
from tideforge.errors import CandidateError

LEAST_MEMORY = 2 << 30  # bytes that a worker may hold on any machine


class Lab:
    """Everything that one authority uses of an endpoint's state folder. Close it to end its workers."""

    def __init__(self, settings: Settings, events: Path | None = None, private_logits: bool = False) -> None:
        """`events`: the folder whose events.jsonl counts the workers started here; the state folder if absent.

        `private_logits`: the workers' logits are their own, not the arena's. Then several may share an arena and step at once.
        UserError when the settings require a sandbox that cannot be had here.
        """
        self.settings, self.private_logits = settings, private_logits
        self.events = events or settings.state
        self.config = ModelConfig.load(settings.model)
        self.layout = settings.arena_layout(self.config)
        settings.state.mkdir(parents=True, exist_ok=True)
        sweep(settings.state / "scratch")  # an authority that was killed with all of its own left them
        self._keeper: socket.socket | None = None
        self._asking = threading.RLock()  # one question to the keeper at a time
        self._weights: protocol.Message | None = None
        self.sandbox = sandbox_for(
            settings.sandbox, places_of(settings), settings.device, worker_environment(settings.threads)
        )
        log = settings.state / "logs" / "workers.log"
        self.nursery = Nursery(log, worker_environment(settings.threads), self.sandbox)
        self._workers: dict[RemoteExecutor, str] = {}  # and the id of the forward that each was given first
        self.trusted_kernels: Path | None = None
        self.rehearsal: str | None = None  # folder of the trusted forward
        self.memory_bytes = settings.worker_memory_bytes or max(LEAST_MEMORY, procfs.available_bytes() // 2)

    @property
    def weights_sha256(self) -> str:
        return str(self._ask_weights().header["sha256"])

    @property
    def weights_bytes(self) -> int:
        return int(self._ask_weights().header["bytes"])

    def _keeper_socket(self) -> socket.socket:
        if self._keeper is None:
            self._keeper = connect_keeper(self.settings)
        return self._keeper

    def _ask_weights(self) -> protocol.Message:
        with self._asking:
            if self._weights is None:
                self._weights = self.ask_keeper({"type": "weights"})
            return self._weights

    def arena(self, name: str) -> Arena:
        """The named KV arena and logits buffer, owned by the keeper."""
        self.nursery.start()  # whoever has an arena wants a worker soon
        request = {"type": "arena", "name": name, "bytes": self.layout.bytes}
        fds = self.ask_keeper(request).fds
        return Arena(self.layout, fds, _Kept(self, name) if self.settings.device != "cpu" else None)

    def weights_intact(self) -> bool:
        """Whether nobody has written the weights since the last call; the keeper restores them if somebody has."""
        return bool(self.ask_keeper({"type": "intact"}).header["intact"])

    def ask_keeper(self, request: dict[str, Any]) -> protocol.Message:
        with self._asking:
            return protocol.call(self._keeper_socket(), request, START_TIMEOUT_S)

    @contextlib.contextmanager
    def other_weights(self, seed: int) -> Iterator[str]:
        """Workers that start meanwhile map weights that `seed` has changed (perturb.py). Yields why not, "" where they do."""
        own, answer = self._ask_weights(), self.ask_keeper({"type": "perturb", "seed": seed})
        try:
            self._weights = answer if not answer.header["problem"] else own
            yield str(answer.header["problem"])
        finally:
            self._weights = own
            for fd in answer.fds:
                os.close(fd)
            self.ask_keeper({"type": "unperturb"})

    def spare(self, arena: Arena, clock_held: bool = False) -> RemoteExecutor:
        """A worker with memory mapped, waiting for a forward. `clock_held`: whoever asks holds the clock, and it need not."""
        worker = self._spawn(arena, clock_held)
        self._workers[worker] = ""
        log_event(self.events, "worker_start", worker=worker.pid)
        return worker

    def _spawn(self, arena: Arena, clock_held: bool) -> RemoteExecutor:
        shared = int(self._ask_weights().header["bytes"]) + self.layout.bytes
        ward, sock = self.nursery.ward(
            self.settings.state / "scratch", self.memory_bytes + shared, worker_environment(self.settings.threads),
            self.settings.device,
        )  # fmt: skip
        worker = RemoteExecutor(ward, sock, arena)
        if self.trusted_kernels is not None:
            copy_kernels(self.trusted_kernels, kernels_of(worker))
        header, fds = self.attachment(arena, kernels_of(worker))
        if self.rehearsal is None or clock_held:
            protocol.send(sock, header, fds=fds)
        else:
            with self._clock_path.open("a") as clock:  # a worker sees no lock file; of this one it has its own opening
                protocol.send(sock, {**header, "clock": True}, fds=(*fds, clock.fileno()))
        return worker

    def attachment(self, arena: Arena, kernels: Path) -> tuple[dict[str, Any], tuple[int, int]]:
        """What attaches a worker: the message, and the descriptors of weights and arena. It compiles into `kernels`."""
        weights = self._ask_weights()
        header = {
            "type": "attach", "model": str(self.settings.model.resolve()), "dtype": self.settings.dtype,
            "threads": self.settings.threads, "device": self.settings.device, "cpus": list(self.settings.worker_cpus),
            "memory_bytes": self.memory_bytes,
            "layout": self.layout.to_dict(), "limits": vars(self.settings.limits),
            "entries": weights.header["entries"], "bytes": weights.header["bytes"], "clock": False,
            "kernels": str(kernels), "rehearse": self.rehearsal, "dry": self.settings.dry_runs,
            "private_logits": self.private_logits,
        }  # fmt: skip
        return header, (weights.fds[0], arena.worker_fd)

    def wait_ready(self, worker: RemoteExecutor, timeout_s: float = START_TIMEOUT_S) -> None:
        """Blocks until a spare is attached; idempotent."""
        if not worker.ready:
            worker.expect_ready(timeout_s)

    def spawn(
        self, forward: Forward, arena: Arena, layers: range | None = None, timeout_s: float = 60
    ) -> RemoteExecutor:
        """A fresh worker that runs `forward`. Raises CandidateError with the outcome when it does not get that far."""
        worker = self.spare(arena)
        try:
            self.stage(worker, forward, layers, timeout_s)
        except CandidateError:
            self.release(worker)
            raise
        return worker

    def stage(
        self, worker: RemoteExecutor, forward: Forward, layers: range | None = None, timeout_s: float = 60
    ) -> float:
        """Gives a spare its forward; seconds that import and build took in the worker."""
        self.wait_ready(worker)
        folder = forward.save(self.settings.state / "forwards").resolve()
        layers = layers or range(self.config.num_hidden_layers)
        if not self._workers.get(worker):  # what runs in there later could turn a folder into a link
            copy_kernels(self.kernels(forward), kernels_of(worker))
            self._workers[worker] = forward.id
        return worker.stage(folder, layers, timeout_s, kernels_of(worker), self.settings.capture_rows)

    def trust(self, forward: Forward) -> None:
        """From now on spares rehearse with this forward, and candidates begin with the kernels that it compiled."""
        self.trusted_kernels = self.keep_kernels(forward)
        self.rehearsal = str(forward.save(self.settings.state / "forwards").resolve())

    def capture(self, worker: RemoteExecutor, timeout_s: float = 60, sampling: bool = False) -> float:
        """Captures the graphs that the settings ask for; seconds. Nothing to do on the CPU. `sampling`: see Runner.capture."""
        shapes = self.settings.graph_shapes
        return worker.capture(shapes, timeout_s, sampling) if shapes else 0.0

    def kernels(self, forward: Forward) -> Path:
        """The folder of what is kept of a forward's compiled kernels; no worker writes there. It may not exist.

        Of candidates nothing is kept: each new worker of one is as fresh as its first, and finds no more than its source.
        """
        return (self.settings.state / "kernels" / forward.id).resolve()

    def keep_kernels(self, forward: Forward) -> Path:
        """Keeps what the workers that run a trusted forward have compiled, for the next ones; the folder."""
        folder = self.kernels(forward)
        for worker, runs in list(self._workers.items()):
            if runs == forward.id:
                copy_kernels(kernels_of(worker), folder)
        return folder

    def release(self, worker: RemoteExecutor) -> None:
        """Ends the worker; idempotent."""
        worker.close()
        self._workers.pop(worker, None)

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Exclusive among all processes of this endpoint: only one measures, and nothing compiles meanwhile."""
        with self._clock_path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def _clock_path(self) -> Path:
        return (self.settings.state / "clock.lock").resolve()

    def close(self) -> None:
        for worker in list(self._workers):
            self.release(worker)
        self.nursery.close()
        if self._keeper is not None:
            self._keeper.close()


class _Kept:
    """An arena in device memory: the keeper copies both ways and fills."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab, self._name = lab, name

    def fetch(self, offset: int, count: int) -> None:
        self._lab.ask_keeper({"type": "fetch", "name": self._name, "offset": offset, "bytes": count})

    def store(self, offset: int, count: int) -> None:
        self._lab.ask_keeper({"type": "store", "name": self._name, "offset": offset, "bytes": count})

    def digests(self, planes: Sequence[Plane], secret: int) -> np.ndarray:
        header = {"type": "digests", "name": self._name, "secret": secret}
        return self._lab.ask_keeper({**header, "planes": [dataclasses.astuple(plane) for plane in planes]}).arrays[
            "digests"
        ]

    def fill(self, count: int, value: int) -> None:
        self._lab.ask_keeper({"type": "fill", "name": self._name, "bytes": count, "value": value})


def places_of(settings: Settings) -> Places:
    """What workers may see of an endpoint's files."""
    state = settings.state.resolve()
    return Places(state, state / "scratch", state / "logs", state / "forwards", settings.model.resolve())


def require_sandbox(model: Path, device: str) -> None:
    """UserError where workers can have no sandbox. Writes nothing that stays."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(state=Path(folder), model=model, device=device)
        sandbox_for(REQUIRE, places_of(settings), device, worker_environment(1))


def kernels_of(worker: RemoteExecutor) -> Path:
    """Where a worker compiles: in its own folder, which ends with it."""
    return worker.ward.own / "kernels"


def worker_environment(threads: int) -> dict[str, str]:
    """What a worker may see of the environment: no keys, no addresses."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k in ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
    }
    kept |= {k: v for k, v in os.environ.items() if k.startswith("OPENBLAS_")}
    count = str(threads)
    here = str(Path(tideforge.__file__).parents[1])  # a worker starts in a folder of its own
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), here)))
    # Compiling in a pool of processes would leave them behind.
    kept["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    return {**kept, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "PYTHONUNBUFFERED": "1"}
