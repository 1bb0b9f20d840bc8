"""The authority's end of a warden: where a worker comes from, what runs in it, how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from tideforge.engine import procfs
from tideforge.engine.removal import remove
from tideforge.errors import CandidateError, ProtocolError

START_S = 30.0
END_S = 40.0  # longer than the warden takes to give up on processes that do not die
CLEAR_S = 5.0  # what a worker left in its folder keeps nobody waiting longer
MARKER = "TIDEFORGE_WARD"
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Census:
    """What a worker consists of now. `processes` are those beside it."""

    processes: int
    threads: int
    weights_faults: int  # stores into the weights that the kernel refused


@dataclasses.dataclass(frozen=True)
class End:
    """How a worker ended, as its warden saw it."""

    code: int | None  # exit code, or minus the signal; None: not seen
    by_itself: bool = False
    verdict: str = ""  # why the warden ended it: a value of Outcome
    why: str = ""
    left: int = 0  # processes that it left behind; all killed
    weights_faults: int = 0
    starved: bool = False  # the kernel killed for want of memory meanwhile
    undead: int = 0  # processes that SIGKILL did not end in time

    def error(self) -> CandidateError:
        """The outcome, from the most that is known of it."""
        rest = f"; {self.left} processes left behind were killed" if self.left else ""
        outcome, message = self._cause()
        return CandidateError(outcome, message + rest)

    def _cause(self) -> tuple[str, str]:
        if self.verdict:
            return self.verdict, self.why
        if self.code is None:
            return "crashed", "the worker and its warden were killed"
        if self.code == -signal.SIGSEGV and self.weights_faults:
            return "weights_written", "a store into the weights was refused (SIGSEGV)"
        if self.code == -signal.SIGKILL and self.starved:
            return "out_of_memory", "the kernel killed the worker for want of memory"
        if self.code < 0:
            return "crashed", f"the worker died of {signal_name(-self.code)}"
        return "exited", f"the worker ended by itself with code {self.code}"


def process_of(pidfd: int) -> int:
    """The process id, as this end sees it: in a sandbox the process has another. pidfd_open(2), fdinfo.

    ProcessLookupError once it has ended: -1, which is shown then, means every process to whoever kills it.
    """
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
    if pid <= 0:
        raise ProcessLookupError(f"what pidfd {pidfd} stood for has ended")
    return pid


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Ward:
    """A worker under its warden. `end` takes everything away that the worker ever started; it may be called again."""

    def __init__(self, warden: int, control: socket.socket, marker: str, own: Path = Path()) -> None:
        """`warden`: its pidfd, which never means another process. `own`: the worker's folder.

        Raises ProtocolError when it starts no worker.
        """
        self._warden, self._control, self._marker, self.own = warden, control, marker, own
        self._buffer = b""
        self.ended: End | None = None
        self._fds: list[int] = []
        self._expect("pid", START_S)
        try:
            self.pid, self.warden_pid = process_of(self._fds[0]), process_of(warden)
        except ProcessLookupError:
            raise ProtocolError("a worker or its warden ended as soon as it was started") from None
        finally:
            for fd in self._fds:
                os.close(fd)
        self._statm: int | None = None

    @property
    def alive(self) -> bool:
        return self.ended is None and not self._warden_ends(0)

    def _warden_ends(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._warden, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def _kill_warden(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self._warden, signal.SIGKILL)

    def census(self, timeout_s: float = 5.0) -> Census:
        """Raises CandidateError when the worker has ended."""
        with contextlib.suppress(OSError):
            self._control.sendall(b"census\n")
        answer = self._expect("processes", timeout_s)
        return Census(**{field.name: int(answer[field.name]) for field in dataclasses.fields(Census)})

    def anonymous_bytes(self) -> int:
        """Resident memory of the worker's own, 0 once it has ended. Cheap: it is read after each step."""
        try:
            if self._statm is None:
                self._statm = os.open(f"{procfs.PROC}/{self.pid}/statm", os.O_RDONLY)
            fields = os.pread(self._statm, 128, 0).split()
        except OSError:
            return 0
        return PAGE * (int(fields[1]) - int(fields[2])) if fields else 0

    def cpu_seconds(self) -> float:
        """CPU time that the worker used so far, with its threads, what it started and still runs, and what of that it waited for.

        Read from outside, in microseconds: the difference of two calls says what it did meanwhile. 0 once it has ended.
        """
        return sum(map(procfs.cpu_seconds, procfs.below(self.warden_pid)))

    def end(self, patience_s: float = 0.0) -> End:
        """How the worker ended; it is ended now when it has not within `patience_s`."""
        self._await_end(patience_s)
        if self.ended is None:
            with contextlib.suppress(OSError):
                self._control.sendall(b"end\n")
            self._await_end(END_S)
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None
        reported, self.ended = self.ended is not None, self.ended or End(None)
        if self._warden >= 0:
            self._bury(reported)
        return self.ended

    def _await_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.ended is None and self._line(deadline - time.monotonic()):
            pass

    def _bury(self, reported: bool) -> None:
        """Waits for the warden's end; one that was killed leaves it to this end to kill what it watched, and to clear up.

        One that has reported and goes on clears the worker's folder: it is left to that.
        """
        self._control.close()
        if not reported:
            self._warden_ends(END_S)
            self._kill_warden()
            procfs.kill(procfs.marked(f"{MARKER}={self._marker}"))
            if self.own.name:
                remove(self.own, CLEAR_S)
        else:
            self._warden_ends(CLEAR_S)
        os.close(self._warden)
        self._warden = -1

    def _expect(self, key: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and (line := self._line(left)):
            if key in line:
                return line
            if self.ended is not None:
                raise self.ended.error()
        self._kill_warden()
        raise ProtocolError("a worker's warden did not answer")

    def _line(self, timeout_s: float) -> dict[str, Any]:
        """One line of the warden's, {} when none comes. The last one is kept as `ended`."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            try:
                self._control.settimeout(max(1e-3, deadline - time.monotonic()))
                got, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
                self._fds += fds
            except OSError:  # TimeoutError among them
                return {}
            if not got:
                return {}
            self._buffer += got
        head, _, self._buffer = self._buffer.partition(b"\n")
        line: dict[str, Any] = json.loads(head)
        if "end" in line:
            self.ended = End(**line["end"])
        return line
