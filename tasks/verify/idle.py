"""Whether the candidate's worker rests while the incumbent is timed: the kernel's own count of processor time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator

from tideforge.engine.ward import Ward

TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # the kernel counts in these what ended children took
SHARE = 0.02  # of the time, for what a process does that waits


@dataclasses.dataclass
class Idle:
    """Seconds that were watched so far, and the processor time that the watched process took in them."""

    threads: int  # that the engine allows a forward: their pool may spin a moment after a step
    watched_s: float = 0.0
    busy_s: float = 0.0
    reads: int = 0

    @contextlib.contextmanager
    def watching(self, ward: Ward) -> Iterator[None]:
        before, begin = ward.cpu_seconds(), time.perf_counter()
        yield
        self.watched_s += time.perf_counter() - begin
        self.busy_s += max(0.0, ward.cpu_seconds() - before)
        self.reads += 1

    @property
    def allowed_s(self) -> float:
        """Two ticks a reading and a thread, and SHARE."""
        return SHARE * self.watched_s + 2 * TICK_S * self.reads * self.threads
