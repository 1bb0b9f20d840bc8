"""Where an authority's workers come from: its end of the nursery, which forks a warden and a worker on request."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tideforge.engine import procfs, protocol
from tideforge.engine.removal import remove
from tideforge.engine.sandbox import PLAIN, Sandbox
from tideforge.engine.ward import MARKER, Ward, process_of
from tideforge.engine.warden import Charge
from tideforge.errors import PeerGone, ProtocolError

IMPORT_S = 120.0  # torch and triton, on a slow disk
ROOM = 4096  # bytes of a nursery's environment that its children may write their own over (forked.show)
TRIES = 2
MARK = 8  # bytes


class Nursery:
    """Imports once what every worker needs. One that has died is started again when it is needed."""

    def __init__(self, log: Path, environment: Mapping[str, str], sandbox: Sandbox = PLAIN) -> None:
        """`log`: for what it and its wardens print. `environment`: its own; its children get theirs one by one."""
        self.log, self._environment, self.sandbox = log, environment, sandbox
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None  # in a sandbox it is not the process started here
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """None until it had a first worker, and when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            return process_of(self._pidfd) if self._pidfd is not None else None
        return None

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
        if self.sandbox.on:
            command = [*self.sandbox.words, *command, "--confined"]
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
        marker = secrets.token_hex(MARK)
        own = scratch.resolve() / marker
        charge = Charge(
            log=str(self.log.resolve()), scratch=str(own), memory_bytes=memory_bytes, device=device,
            confined=self.sandbox.on, hidden=self.sandbox.hidden,
            environment={MARKER: marker, **environment, **folders(own)},  # the mark first: what /proc shows may be cut
        )  # fmt: skip
        for _ in range(TRIES):
            with contextlib.suppress(PeerGone):
                return self._ward(charge, marker, own)
        raise ProtocolError(f"the nursery ended while it was asked for a worker; see {self.log}")

    def _ward(self, charge: Charge, marker: str, own: Path) -> tuple[Ward, socket.socket]:
        # A pair of sockets for each try: a warden of the last one may be alive.
        control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(control.close)
            undo.callback(ours.close)
            with there, theirs:
                warden = self._bear(charge, (there.fileno(), theirs.fileno()))
            undo.callback(os.close, warden)
            ward = Ward(warden, control, marker, own)
            undo.pop_all()
            return ward, ours

    def _bear(self, charge: Charge, fds: Sequence[int]) -> int:
        """A new warden's pidfd."""
        with self._lock:
            self._start()
            try:
                protocol.send(self._sock, {"type": "bear", **dataclasses.asdict(charge)}, fds=fds)
                warden, itself = protocol.recv(self._sock, IMPORT_S).fds
            except ProtocolError:
                self._end()
                raise
            self._forget()
            self._pidfd = itself
            return warden

    def close(self) -> None:
        """Its wardens go on until their own sockets are closed."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._sock.close()
            self._kill()
            self._process.wait()
            self._process = None
            self._forget()

    def _kill(self) -> None:
        """A sandbox lasts as long as a warden lives in it; what no warden is in yet goes as a whole."""
        assert self._process is not None
        if self._pidfd is not None:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:
            procfs.kill(procfs.below(self._process.pid))
        self._process.kill()

    def _forget(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def folders(own: Path) -> dict[str, str]:
    """A worker writes, compiles and caches in a folder of its own, which ends with it."""
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    return {name: str(own) for name in names}


def sweep(scratch: Path) -> None:
    """Removes the folders of workers that nothing runs for any more: neither they nor their wardens live."""
    names = [path.name for path in scratch.glob("*") if re.fullmatch(f"[0-9a-f]{{{2 * MARK}}}", path.name)]
    if not names:  # these first: a warden is marked before it makes its folder
        return
    alive = procfs.marks(MARKER)
    for name in set(names) - alive:
        remove(scratch / name)
