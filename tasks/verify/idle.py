"""Whether the candidate's worker rests while the incumbent is timed: the kernel's own count of processor time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator

from tideforge.engine import procfs

TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # the kernel counts in these
SHARE = 0.02  # of the time, for what a process does that waits


def family(pid: int) -> list[int]:
    """A worker, all that it started and what holds its namespace. What lost its parent has the worker's own, its warden."""
    fields = _stat(pid)
    return procfs.descendants(int(fields[1])) if fields else []


def cpu_s(pid: int) -> float:
    """Processor time of a worker and of all that it started and that runs or was waited for; ended ones lose theirs."""
    return TICK_S * sum(sum(map(int, _stat(one)[11:15])) for one in family(pid))


def _stat(pid: int) -> list[bytes]:
    """proc(5): fields 3 and later of stat, whose second may hold anything: state, parent, ..., utime, stime, cutime, cstime."""
    try:
        with open(f"{procfs.PROC}/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


@dataclasses.dataclass
class Idle:
    """Seconds that were watched so far, and the processor time that the watched process took in them."""

    threads: int  # that the engine allows a forward: their pool may spin a moment after a step
    watched_s: float = 0.0
    busy_s: float = 0.0
    reads: int = 0

    @contextlib.contextmanager
    def watching(self, pid: int) -> Iterator[None]:
        before, begin = cpu_s(pid), time.perf_counter()
        yield
        self.watched_s += time.perf_counter() - begin
        self.busy_s += max(0.0, cpu_s(pid) - before)
        self.reads += 1

    @property
    def allowed_s(self) -> float:
        """Two ticks a reading and a thread, and SHARE."""
        return SHARE * self.watched_s + 2 * TICK_S * self.reads * self.threads
