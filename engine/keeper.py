"""The keeper: owns weights and KV memory, runs no candidate code, outlives service, server and workers.

Weights lie in one sealed memory segment: a store from any process is a SIGSEGV there and nobody can lift that. KV arenas
are segments by name. Both are handed over as file descriptors, so a worker's death changes nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tideforge.engine import memory, procfs, protocol, sockets
from tideforge.engine.digests import Plane
from tideforge.engine.events import log_event
from tideforge.engine.segment import DeviceSegment, Filler, Segment
from tideforge.engine.weights import RANDOM, fingerprint, read_tensors
from tideforge.errors import PREFIX, ProtocolError, UserError

if TYPE_CHECKING:
    from torch import Tensor

ROOM = 1 << 30  # bytes that a second copy of the weights must leave free


def convert(array: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """To `wanted` (float32, float16, or bfloat16 as uint16 bits, rounded to nearest even)."""
    if stored == "BF16":
        if wanted == "bfloat16":
            return array
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if wanted == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype(wanted)


def free_bytes(device: str) -> int:
    """Memory that a further segment can have."""
    if device == "cpu":
        return procfs.available_bytes()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def by_numbers(name: str) -> list[str | int]:
    """Sorts expert 2 before expert 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Keeper:
    """Holds the segments. Thread-safe: one lock around the arenas and around looking at the weights."""

    def __init__(self, model: Path, dtype: str, device: str = "cpu") -> None:
        self.model, self.dtype, self.device, self.started = model, dtype, device, time.time()
        self.arenas: dict[str, Segment] = {}
        self.other: Segment | None = None  # the weights under a seed, while somebody wants them
        self._lock = threading.Lock()
        self.users = 0  # connections
        self.fingerprint = fingerprint(model)  # before they are read: what changes meanwhile shows
        self.loads = 0
        self._load()

    def _load(self) -> None:
        if (self.model / RANDOM).exists():
            self._draw()
        else:
            self._read()
        self.loads += 1

    def _read(self) -> None:
        """The checkpoint's files; sha256 is over every tensor's name, shape, precision and bytes."""
        tensors = list(read_tensors(self.model))
        self._lay_out({name: array.shape for name, _, array in tensors})
        self.weights = self._segment("weights", self.size)
        digest = hashlib.sha256()
        with mmap.mmap(self.weights.fds[0], self.size) as target:
            for entry, (_, stored, array) in zip(self.entries, tensors, strict=True):
                data = convert(array, stored, self.dtype).tobytes()
                target[entry.offset : entry.offset + entry.bytes] = data
                digest.update(f"{entry.name} {entry.shape} {self.dtype}\n".encode() + data)
        self.weights.publish()
        self.sha256 = digest.hexdigest()

    def _draw(self) -> None:
        """Random weights, in place: the host holds no copy. sha256 is over what says how they are drawn and a checksum of them."""
        import torch

        from tideforge.engine.random_weights import RandomWeights

        drawn = RandomWeights.load(self.model)
        self._lay_out({name: entry.shape for name, entry in drawn.drawn.items()})

        def fill(pages: torch.Tensor) -> None:
            for entry in self.entries:
                target = pages[entry.offset : entry.offset + entry.bytes].view(getattr(torch, self.dtype))
                drawn.fill(entry.name, target)

        self.weights = self._segment("weights", self.size, fill)
        self.weights.publish()
        self.sha256 = drawn.digest(torch.device(self.device), self.weights.checksum)

    def _lay_out(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Entries in the order of `shapes`, places in that of names: the experts of a layer lie one after another (contract.Context)."""
        places: dict[str, memory.TensorEntry] = {}
        self.size = 0
        for name in sorted(shapes, key=by_numbers):
            size = math.prod(shapes[name]) * memory.ITEM_BYTES[self.dtype]
            places[name] = memory.TensorEntry(name, shapes[name], self.size, size)
            self.size += -(-size // memory.ALIGN) * memory.ALIGN
        self.entries = [places[name] for name in shapes]

    def _segment(self, name: str, size: int, filler: Filler | None = None) -> Segment:
        if self.device == "cpu":
            return Segment(name, size, filler)
        return DeviceSegment(name, size, self.device, filler)

    def answer(self, header: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """One request -> (answer, descriptors to hand over). "digests" is an array."""
        kind = header["type"]
        if kind == "weights":
            entries = [[e.name, list(e.shape), e.offset, e.bytes] for e in self.entries]
            return {**self.status(), "type": "weights", "entries": entries}, [self.weights.fds[-1]]
        if kind == "arena":
            return {"type": "arena"}, self.arena(str(header["name"]), int(header["bytes"])).fds
        if kind == "fetch":
            self.arenas[str(header["name"])].fetch(int(header["offset"]), int(header["bytes"]))
            return {"type": "fetched"}, []
        if kind == "store":
            self.arenas[str(header["name"])].store(int(header["offset"]), int(header["bytes"]))
            return {"type": "stored"}, []
        if kind == "fill":
            self.arenas[str(header["name"])].fill(int(header["bytes"]), int(header["value"]))
            return {"type": "filled"}, []
        if kind == "digests":
            planes = [Plane(*map(int, plane)) for plane in header["planes"]]
            found = self.arenas[str(header["name"])].digests(planes, int(header["secret"]))
            return {"type": "digests", "digests": found}, []
        if kind == "intact":
            with self._lock:
                return {"type": "intact", "intact": self.weights.restore()}, []
        if kind == "perturb":
            return self.perturb(int(header["seed"]))
        if kind == "unperturb":
            self.unperturb()
            return {"type": "unperturbed"}, []
        if kind == "drop":
            self.drop(str(header["name"]))
            return {"type": "dropped"}, []
        if kind == "status":
            return {**self.status(), "type": "status"}, []
        raise ProtocolError(f"the keeper does not know {kind!r}")

    def perturb(self, seed: int) -> tuple[dict[str, Any], list[int]]:
        """As "weights", of a second segment in which `seed` has changed them (perturb.py); or the problem, where it has no room."""
        self.unperturb()
        with self._lock:
            if self.size > (room := free_bytes(self.device)) - ROOM:
                return {"type": "perturbed", "problem": f"they take {self.size} bytes, and {room} are free"}, []
            self.other = self._segment("other-weights", self.size, lambda pages: self._negate(pages, seed))
            self.other.publish()
        return {**self.answer({"type": "weights"})[0], "type": "perturbed", "problem": ""}, [self.other.fds[-1]]

    def _negate(self, pages: Tensor, seed: int) -> None:
        import torch

        from tideforge.engine.perturb import negate

        self.weights.copy_to(pages)
        for entry in self.entries:
            part = pages[entry.offset : entry.offset + entry.bytes].view(getattr(torch, self.dtype))
            negate(part.reshape(entry.shape), seed, entry.name)

    def unperturb(self) -> None:
        with self._lock:
            if self.other is not None:
                self.other.close()
            self.other = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """As long as somebody is connected."""
        with self._lock:
            self.users += 1
        try:
            yield
        finally:
            with self._lock:
                self.users -= 1

    def status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(), "model": str(self.model), "dtype": self.dtype, "sha256": self.sha256, "bytes": self.size,
            "loads": self.loads, "started": self.started, "device": self.device, "fingerprint": self.fingerprint,
            "users": self.users,
            "arenas": {name: segment.size for name, segment in self.arenas.items()},
        }  # fmt: skip

    def arena(self, name: str, size: int) -> Segment:
        """The segment of that name; made anew when the size differs (holders of the old one keep theirs)."""
        with self._lock:
            if name in self.arenas and self.arenas[name].size != size:
                self.arenas.pop(name).close()
            if name not in self.arenas:
                self.arenas[name] = self._segment(name, size)
            return self.arenas[name]

    def drop(self, name: str) -> None:
        with self._lock:
            if name in self.arenas:
                self.arenas.pop(name).close()


def serve(keeper: Keeper, listener: socket.socket) -> None:
    """Answers each connection in a thread of its own, until the process is told to end."""

    def handle(connection: socket.socket) -> None:
        with connection, keeper.used():
            converse(keeper, connection)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=handle, args=(connection,), daemon=True).start()


def converse(keeper: Keeper, connection: socket.socket) -> None:
    """Until the peer goes away."""
    while True:
        try:
            request = protocol.recv(connection)
            answer, fds = keeper.answer(request.header)
        except (ProtocolError, KeyError, OSError) as error:
            if not isinstance(error, ProtocolError) or "does not know" in str(error):
                protocol.send(connection, {"type": "error", "message": str(error)})
                continue
            return  # the peer went away or talks nonsense: its connection ends, nothing else does
        arrays = {name: answer.pop(name) for name in ("digests",) if name in answer}
        protocol.send(connection, answer, arrays, fds)


def main() -> None:
    parser = argparse.ArgumentParser(description="hold weights and KV memory for an endpoint")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(memory.ITEM_BYTES), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--state", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        keeper = Keeper(args.model, args.dtype, args.device)
    except UserError as error:
        print(f"{PREFIX}{error}", file=sys.stderr, flush=True)
        sys.exit(2)
    log_event(args.state, "weight_load", model=str(args.model), sha256=keeper.sha256, bytes=keeper.size)
    with sockets.listen(args.state / "keeper.sock", 16) as listener:
        serve(keeper, listener)


if __name__ == "__main__":
    main()
