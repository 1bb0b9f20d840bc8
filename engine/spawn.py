"""Where an authority's workers come from: its end of the nursery, which forks a warden and a worker on request."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tideforge.engine import protocol
from tideforge.engine.ward import MARKER, Ward
from tideforge.engine.warden import Charge
from tideforge.errors import PeerGone, ProtocolError

IMPORT_S = 120.0  # torch and triton, on a slow disk
ROOM = 4096  # bytes of a nursery's environment that its children may write their own over (forked.show)
TRIES = 2


class Nursery:
    """Imports once what every worker needs. One that has died is started again when it is needed."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """`log`: for what it and its wardens print. `environment`: its own; its children get theirs one by one."""
        self.log, self._environment = log, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts it unless it runs, and does not wait until it is ready."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-P", "-m", "tideforge.engine.nursery", "--fd", str(theirs.fileno())]
        # It must stay single-threaded, and numpy's library would start its threads at once.
        environment = {**self._environment, "OPENBLAS_NUM_THREADS": "1", "TIDEFORGE_ROOM": "." * ROOM}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, env=environment,
            )  # fmt: skip

    def ward(
        self, scratch: Path, memory_bytes: int, environment: Mapping[str, str], device: str = "cpu"
    ) -> tuple[Ward, socket.socket]:
        """A worker under its warden, with a folder of its own below `scratch`, and the authority's end of its socket.

        Raises ProtocolError when there is none to be had.
        """
        marker = secrets.token_hex(8)
        own = scratch.resolve() / marker
        charge = Charge(
            log=str(self.log.resolve()), scratch=str(own), memory_bytes=memory_bytes, device=device,
            environment={MARKER: marker, **environment, **folders(own)},  # the mark first: what /proc shows may be cut
        )  # fmt: skip
        for _ in range(TRIES):
            with contextlib.suppress(PeerGone):
                return self._ward(charge, marker)
        raise ProtocolError(f"the nursery ended while it was asked for a worker; see {self.log}")

    def _ward(self, charge: Charge, marker: str) -> tuple[Ward, socket.socket]:
        # A pair of sockets for each try: a warden of the last one may be alive.
        control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(control.close)
            undo.callback(ours.close)
            with there, theirs:
                warden = self._bear(charge, (there.fileno(), theirs.fileno()))
            undo.callback(os.close, warden)
            ward = Ward(warden, control, marker)
            undo.pop_all()
            return ward, ours

    def _bear(self, charge: Charge, fds: Sequence[int]) -> int:
        """A new warden's pidfd."""
        with self._lock:
            self._start()
            try:
                protocol.send(self._sock, {"type": "bear", **dataclasses.asdict(charge)}, fds=fds)
                return protocol.recv(self._sock, IMPORT_S).fds[0]
            except ProtocolError:
                self._end()
                raise

    def close(self) -> None:
        """Its wardens go on until their own sockets are closed."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._sock.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def folders(own: Path) -> dict[str, str]:
    """A worker writes, compiles and caches in a folder of its own, which ends with it."""
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    return {name: str(own) for name in names}
