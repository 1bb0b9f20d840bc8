"""A worker: one disposable process that runs one forward. It executes steps that the authority sends; it decides nothing.

It imports nothing but torch, numpy and this package's engine. What it says about time or success is a hint at best.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import mmap
import os
import resource
import select
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tideforge.engine import contract, memory, protocol
from tideforge.engine import device as device_memory
from tideforge.engine.dry import dry_run
from tideforge.engine.faults import fault, observe, watch_threads
from tideforge.engine.guard import limit_data
from tideforge.engine.runner import GraphShape, Runner
from tideforge.engine.wallclock import unhinge
from tideforge.errors import CandidateError, PeerGone

MAX_OUTPUT_BYTES = 16 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def map_weights(
    fd: int, size: int, entries: list[list[Any]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The weights by checkpoint name, on read-only pages: a store is a SIGSEGV, or an illegal access on a GPU."""
    if device.type == "cpu":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            pages = torch.frombuffer(memory.map_read_only(fd, size), dtype=torch.uint8)
    else:
        pages = device_memory.attach(fd, size, device, writable=False)
    return {name: pages[at : at + count].view(dtype).reshape(shape) for name, shape, at, count in entries}


def map_arena(fd: int, layout: memory.ArenaLayout, device: torch.device) -> tuple[contract.KVGroup, Tensor]:
    """The KV group and the logits buffer [max_logits, V] of an arena."""
    if device.type == "cpu":
        pages = torch.frombuffer(mmap.mmap(fd, layout.bytes), dtype=torch.uint8)
    else:
        pages = device_memory.attach(fd, layout.bytes, device, writable=True)
    layers = range(layout.num_layers)
    keys, values = (tuple(_plane(pages, layout, layer, side) for layer in layers) for side in (False, True))
    logits = pages[layout.logits_offset : layout.bytes].view(torch.float32)
    group = contract.KVGroup(layout.block_size, keys, values)
    return group, logits.reshape(layout.max_logits, layout.vocab_size)


def _plane(pages: Tensor, layout: memory.ArenaLayout, layer: int, values: bool) -> Tensor:
    at = layout.plane_offset(layer, values)
    flat = pages[at : at + layout.plane_bytes(values)].view(_DTYPES[layout.dtype])
    return flat.reshape(layout.page_shape(values))


def load_forward(folder: Path, ctx: contract.Context) -> contract.ForwardFn:
    """Imports `folder/forward.py` and builds it. Raises CandidateError with the outcome that was observed."""
    sys.pycache_prefix = tempfile.gettempdir()  # this worker's own folder: nobody's compiled files are taken for these
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("forward", folder / "forward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["forward"] = module
    observe(partial(_import, spec.loader, module), "import_error")

    def build() -> contract.ForwardFn:
        with torch.inference_mode():
            return module.build(ctx)  # type: ignore[no-any-return]

    return observe(build, "build_error")


def _import(loader: Loader, module: ModuleType) -> None:
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        where = f" ({error.filename}, line {error.lineno})"
        raise CandidateError("syntax_error", f"{error.msg:.400}{where:.100}") from error


@contextlib.contextmanager
def exclusive(clock: int | None) -> Iterator[None]:
    """Holds the open lock file that whoever times holds; None: somebody else holds it for this process."""
    if clock is not None:
        fcntl.flock(clock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if clock is not None:
            fcntl.flock(clock, fcntl.LOCK_UN)


class Laps:
    """Where the time goes, by the name that each part is ended with."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now


class Worker:
    """Attached to memory first (as a spare), then given one forward, then stepped until its socket closes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.runner: Runner | None = None
        self.depths: dict[int, Runner] = {}  # by number of layers; the one staged or selected last runs the steps

    def run(self) -> None:
        handlers = {
            "attach": self.attach, "stage": self.stage, "dry": self.dry, "capture": self.capture,
            "step": self.step, "halt": self.halt, "select": self.select,
        }  # fmt: skip
        itself = os.getpid()
        while True:
            try:
                message = protocol.recv(self.sock)
                handlers[message.type](message)
            except PeerGone:
                return
            except BaseException as error:  # of the candidate's also between two steps: a signal handler runs anywhere
                if os.getpid() != itself:
                    raise  # a child of the candidate's has come up here: it ends as any program would
                self._fail(error if isinstance(error, CandidateError) else fault("", error))

    def _fail(self, error: CandidateError) -> None:
        """Without an outcome it is the first that the authority knows of what it asked for (executor.CLAIMABLE)."""
        text = str(error.message)[:500]
        protocol.send(self.sock, {"type": "failed", "outcome": str(error.outcome)[:40], "message": text})

    def attach(self, message: protocol.Message) -> None:
        """Maps weights and arena; after this a stage costs an import and a build only."""
        head, laps = message.header, Laps()
        if head.get("cpus"):
            os.sched_setaffinity(0, head["cpus"])
        torch.set_num_threads(int(head["threads"]))
        self.layout = memory.ArenaLayout(**head["layout"])
        self.dtype = _DTYPES[head["dtype"]]
        self.config = contract.ModelConfig.load(Path(head["model"]))
        self.limits = contract.Limits(**head["limits"])
        self.device = torch.device(head["device"])
        if self.device.type != "cpu":
            device_memory.prepare(self.device)
        laps.end("context")
        self.weights = map_weights(message.fds[0], head["bytes"], head["entries"], self.dtype, self.device)
        self.group, self.logits = map_arena(message.fds[1], self.layout, self.device)
        if head["private_logits"]:
            self.logits = torch.empty_like(self.logits)
        laps.end("map")
        if head["rehearse"]:
            clock = message.fds[2] if head["clock"] else None
            self._rehearse(Path(head["rehearse"]), head["kernels"], clock, head["dry"])
        laps.end("rehearse")
        if self.device.type == "cpu" and head["memory_bytes"]:  # CUDA reserves more than any limit
            limit_data(int(head["memory_bytes"]))
        for fd in message.fds:
            os.close(fd)
        protocol.send(self.sock, {"type": "ready", "pid": os.getpid(), "seconds": laps.seconds})

    def _rehearse(self, folder: Path, kernels: str, clock: int | None, dry: bool) -> None:
        """Calls a trusted forward once on the dummy page, so that libraries and their kernels are loaded; then forgets it.

        Without a dry run, or where that fails, it is run, and the device must be free for it.
        """
        os.environ["TRITON_CACHE_DIR"] = kernels
        before = set(sys.modules)
        forward = load_forward(folder, self._context(range(1), ()))
        runner = Runner(forward, torch.empty_like(self.logits[:1]), self.layout.block_size)
        queries = min(16, self.layout.block_size)
        shapes = [GraphShape(False, 1, 1, 1), GraphShape(True, queries, 1, queries)]
        if not (dry and dry_run(runner, shapes)):
            with exclusive(clock):
                for shape in shapes:
                    runner.rehearse(shape)
                if self.device.type != "cpu":
                    torch.cuda.synchronize(self.device)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(folder):
                del sys.modules[name]

    def stage(self, message: protocol.Message) -> None:
        begin = time.perf_counter()
        os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = message.header["kernels"]
        layers = range(*message.header["layers"])
        ctx = self._context(layers, tuple(message.header["capture_rows"]))
        forward = load_forward(Path(message.header["folder"]), ctx)
        self.runner = Runner(forward, self.logits, self.layout.block_size)
        self.depths[len(layers)] = self.runner
        protocol.send(self.sock, {"type": "staged", "seconds": time.perf_counter() - begin})

    def _context(self, layers: range, capture_sizes: tuple[int, ...]) -> contract.Context:
        return contract.Context(
            config=dataclasses.replace(self.config),
            weights=self.weights,
            dtype=self.dtype,
            device=self.device,
            kv_groups=(self.group,),
            layer_range=layers,
            limits=self.limits,
            capture_sizes=capture_sizes,
        )

    def select(self, message: protocol.Message) -> None:
        self.runner = self.depths[message.header["depth"]]

    def dry(self, message: protocol.Message) -> None:
        """Compiles what the staged forward launches, without running it."""
        assert self.runner is not None
        begin = time.perf_counter()
        whole = dry_run(self.runner, [GraphShape(*shape) for shape in message.header["shapes"]])
        protocol.send(self.sock, {"type": "dried", "whole": whole, "seconds": time.perf_counter() - begin})

    def capture(self, message: protocol.Message) -> None:
        assert self.runner is not None
        begin, head = time.perf_counter(), message.header
        self.runner.capture([GraphShape(*shape) for shape in head["shapes"]], head["sampling"])
        protocol.send(self.sock, {"type": "captured", "seconds": time.perf_counter() - begin})

    def step(self, message: protocol.Message) -> None:
        assert self.runner is not None
        for tokens, more in self.runner.run(message.header, message.arrays, self._halted):
            protocol.send(self.sock, {"type": "tokens", "more": more}, {"tokens": tokens})

    def _halted(self) -> bool:
        """Whether the authority asks for an early end of the step that runs: nothing else can come meanwhile."""
        readable, _, _ = select.select([self.sock], [], [], 0)
        return bool(readable) and protocol.recv(self.sock).type == "halt"

    def halt(self, message: protocol.Message) -> None:
        """It came too late: the step is over."""


def draw_anew() -> None:
    """Seeds what would else give the same numbers in all workers that one process forked; `random` does so itself."""
    np.random.seed()
    torch.default_generator.seed()


def live(fd: int) -> None:
    """A worker's whole life: `fd` is its socket to the authority. Its warden has just forked it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(fd, False)
    draw_anew()
    unhinge()
    watch_threads()
    with socket.socket(fileno=fd) as sock:
        Worker(sock).run()
