"""The warden: one small process a worker, which starts it, watches it, ends it with everything it started, and says how it
ended. It runs no candidate code and needs no more than the standard library.

The nursery forks it, and it forks the worker. Over its control socket, one JSON object a line: {"pid"} first, with a pidfd
of the worker, because its process id means nothing outside a sandbox; for each line "census" what runs now; {"end"} last,
when the worker has ended or the socket got "end" or was closed. So a worker outlives neither the authority nor its warden.

Everything below the worker dies with it, sessions of its own included: by a process namespace where one can be made, else
as descendants of the warden, which adopts what loses its parent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tideforge.engine import procfs
from tideforge.engine.confine import confine, require_pid_namespace
from tideforge.engine.forked import close_all_but, reset_signals, run_as_program, take_over
from tideforge.engine.guard import adopt_orphans, die_with_parent, enter_pid_namespace
from tideforge.engine.removal import remove
from tideforge.engine.tracer import Tracer

WEIGHTS = "tideforge-weights"  # the keeper's name of that segment
DRIVER = "cuda"  # what CUDA's driver calls its threads begins so
POLL_S = 0.05
SCAN_S = 1.0  # between two looks at all processes of the machine
FORKING = 32  # so many new threads on the machine are a reason to look at once
KEPT_OUTPUT = 64 << 10
MAX_LOG = 8 << 20
MAX_OUTPUT = 16 << 20
MAX_WRITTEN = 256 << 20
MAX_PROCESSES = 64
MAX_THREADS = 1024
# Output is counted by the hour: a worker that serves may run for weeks.
HOUR_S = 3600.0
KILL_S = 30.0  # a process whose GPU hangs may take this long to die
_WALL = 0x40000000  # waitid(2): also threads that are traced


@dataclasses.dataclass(frozen=True)
class Charge:
    """What a warden is told of its worker."""

    log: str  # where the head of the worker's output goes
    scratch: str  # the worker's folder, removed at its end
    memory_bytes: int  # what it may hold on the host
    environment: dict[str, str]
    device: str = "cpu"  # where it computes
    confined: bool = False  # the nursery runs in a sandbox, and the worker gets its own part of it
    hidden: tuple[str, ...] = ()  # folders in there that are not the worker's business

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Charge:
        return cls(**{field.name: header[field.name] for field in dataclasses.fields(cls)})


class Warden:
    def __init__(self, control: socket.socket, charge: Charge) -> None:
        self.control, self.charge = control, charge
        self.log, self.scratch, self.memory_bytes = Path(charge.log), Path(charge.scratch), charge.memory_bytes
        self.verdict, self.why = "", ""
        self.code: int | None = None
        self.ending = False
        self.printed = self.others_bytes = self.others_wrote = 0
        self.started = time.monotonic()
        self.next_scan, self.tasks = 0.0, procfs.tasks_in_all()
        self.starved = procfs.kills_by_the_kernel()
        self.selector = selectors.DefaultSelector()
        self._listen()

    def _listen(self) -> None:
        self.woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.output, self.worker_output = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.output, False)
        self.selector.register(self.woken, selectors.EVENT_READ, self._wake)
        self.selector.register(self.output, selectors.EVENT_READ, self._read_output)
        self.selector.register(self.control, selectors.EVENT_READ, self._obey)

    def start(self, worker_fd: int, live: Callable[[int], None]) -> None:
        adopt_orphans()
        self.first = start_first() if self._namespace() else None
        hold, release = os.pipe2(os.O_CLOEXEC)
        self.worker = os.fork()
        if self.worker == 0:
            run_as_program(lambda: self._become(worker_fd, hold, release, live))
        self.tracer = Tracer(self.worker, WEIGHTS)
        for fd in (hold, release, self.worker_output, worker_fd):
            os.close(fd)
        socket.send_fds(self.control, [b'{"pid": %d}\n' % self.worker], [pidfd := os.pidfd_open(self.worker)])
        os.close(pidfd)

    def _namespace(self) -> bool:
        """Whether the worker gets a process namespace. A confined one has a /proc of its own in it; elsewhere /proc stays the
        old one, which CUDA reads by its own process id: on a GPU descendants are adopted."""
        if self.charge.confined:
            return require_pid_namespace()
        return self.charge.device == "cpu" and enter_pid_namespace()

    def _become(self, worker_fd: int, hold: int, release: int, live: Callable[[int], None]) -> None:
        """In the forked child: waits until it is traced, then leads the worker's life."""
        die_with_parent()
        os.setsid()
        os.close(release)
        os.read(hold, 1)  # until the warden has closed its end
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self.worker_output, 1)
        os.dup2(self.worker_output, 2)
        close_all_but({0, 1, 2, worker_fd})
        reset_signals()
        if self.charge.confined:
            confine(self.charge.scratch, self.charge.hidden)
        take_over("tideforge.engine.worker", ("--fd", str(worker_fd)), self.charge.environment)
        with open("/proc/self/oom_score_adj", "w") as file:  # short of memory, the kernel takes a worker first
            file.write("1000")
        live(worker_fd)

    def run(self) -> None:
        while self.code is None and not self.ending:
            for key, _ in self.selector.select(POLL_S):
                key.data()
            self._reap()
            if self.code is None:
                self._patrol()
        self._finish()

    def _wake(self) -> None:
        os.read(self.woken, 4096)

    def _obey(self) -> None:
        words = self.control.recv(4096).split()
        if not words or b"end" in words:
            self.ending = True
        elif b"census" in words:
            self._say(self.census())

    def census(self) -> dict[str, int]:
        others = self._others()
        return {
            "processes": len(others), "threads": self._threads(), "weights_faults": self.tracer.faults,
        }  # fmt: skip

    def _threads(self) -> int:
        """Those of a GPU's driver are its own affair."""
        return procfs.threads(self.worker, "" if self.charge.device == "cpu" else DRIVER)

    def _others(self) -> list[int]:
        """What runs below the warden beside the worker."""
        return [pid for pid in procfs.descendants(os.getpid()) if pid not in (self.worker, self.first)]

    def _read_output(self) -> None:
        try:
            text = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return
        if not text:
            self.selector.unregister(self.output)
            return
        if (room := KEPT_OUTPUT - self.printed) > 0:
            append(self.log, text[:room])
        self.printed += len(text)
        if self.printed > MAX_OUTPUT * self._hours():
            self._judge(
                "too_much_output", f"it printed {self.printed >> 20} MiB; {MAX_OUTPUT >> 20} an hour are allowed"
            )

    def _patrol(self) -> None:
        now, tasks = time.monotonic(), procfs.tasks_in_all()
        if now >= self.next_scan or tasks > self.tasks + FORKING:
            self.next_scan, self.tasks = now + SCAN_S, tasks
            self._scan()
        self._weigh()

    def _weigh(self) -> None:
        """What the worker holds and has written; of what it started, as the last scan saw it."""
        written = procfs.written_bytes(self.worker) + self.others_wrote
        if written > MAX_WRITTEN * self._hours():
            self._judge("too_much_output", f"it wrote {written >> 20} MiB; {MAX_WRITTEN >> 20} an hour are allowed")
        held = procfs.memory_bytes(self.worker) + self.others_bytes
        if held > self.memory_bytes:
            self._judge(
                "out_of_memory", f"it held {held >> 20} MiB on the host; {self.memory_bytes >> 20} were allowed"
            )

    def _scan(self) -> None:
        others = self._others()
        self.others_bytes = sum(map(procfs.share_bytes, others))
        self.others_wrote = sum(map(procfs.written_bytes, others))
        if len(others) > MAX_PROCESSES:
            self._judge("left_processes", f"{len(others)} processes of its own ran; {MAX_PROCESSES} are allowed")
        if (threads := self._threads()) > MAX_THREADS:
            self._judge("left_threads", f"it ran {threads} threads; {MAX_THREADS} are allowed")

    def _hours(self) -> float:
        return 1 + (time.monotonic() - self.started) / HOUR_S

    def _judge(self, verdict: str, why: str) -> None:
        if not self.verdict:
            self.verdict, self.why, self.ending = verdict, why, True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | _WALL)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.tracer.resume(pid, status)
            elif pid == self.worker:
                self.code = os.waitstatus_to_exitcode(status)

    def _finish(self) -> None:
        """Ends what is left and gives the report."""
        by_itself, left = self.code is not None, len(self._others())
        deadline = time.monotonic() + KILL_S
        while (alive := self._kill()) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
        self._reap()
        if self.output in {key.fd for key in self.selector.get_map().values()}:
            self._read_output()
        starved = procfs.kills_by_the_kernel() > self.starved
        end = {
            "code": self.code, "by_itself": by_itself, "verdict": self.verdict, "why": self.why, "left": left,
            "weights_faults": self.tracer.faults, "starved": starved, "undead": len(alive),
        }  # fmt: skip
        self._say({"end": end})
        remove(self.scratch)  # after the report: there may be much of it

    def _kill(self) -> list[int]:
        """SIGKILL to all that lives below the warden; what that was."""
        alive = procfs.descendants(os.getpid())
        if self.first in alive:  # everything in a namespace ends with its first process
            procfs.kill([self.first, self.worker])
        else:
            procfs.kill(alive)
        return alive

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the authority may be gone
            self.control.sendall(json.dumps(message).encode() + b"\n")


def start_first() -> int:
    """The first process of a new namespace: it only reaps, and takes everything in there with it."""
    pid = os.fork()
    if pid == 0:
        run_as_program(only_reap)
    return pid


def only_reap() -> None:
    die_with_parent()
    os.setsid()
    close_all_but(())
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


def append(log: Path, text: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to stop watching
        if log.exists() and log.stat().st_size > MAX_LOG:
            log.replace(log.with_suffix(".log.1"))
        with log.open("ab") as file:
            file.write(text)


def watch(control_fd: int, worker_fd: int, charge: Charge, live: Callable[[int], None]) -> None:
    """A warden's whole life, in a process that was just forked; its worker leads `live(worker_fd)`."""
    os.setsid()
    close_all_but({0, 1, 2, control_fd, worker_fd})
    take_over("tideforge.engine.warden", (), charge.environment)
    scratch = Path(charge.scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    os.chdir(scratch)
    with socket.socket(fileno=control_fd) as control:
        warden = Warden(control, charge)
        warden.start(worker_fd, live)
        warden.run()
