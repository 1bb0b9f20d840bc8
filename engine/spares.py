"""Workers that stand by for candidates, and the arenas that they are attached to."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from tideforge.engine.events import log_event
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.lab import Lab
from tideforge.errors import CandidateError, ProtocolError

POISON = 0xFF  # a NaN in every float type
TRIES = 3  # tries to get a worker for a candidate


class Spares:
    """Spare workers, each on an arena of its own: no two candidates that live at once share pages. Thread-safe.

    There are as many arenas as spares may wait and candidates be under way. An arena is poisoned when its worker is released.

    On the CPU a missing spare is started at once. On a GPU a start (a context, memory mapped, libraries loaded) stalls whatever runs
    on the device for tens of milliseconds, so there spares are started together, when none is left, by whoever holds the clock.
    """

    def __init__(self, lab: Lab, candidates: int, night: Path) -> None:
        """`candidates`: how many may be under way at once. `night`: the folder whose events say what could not be started."""
        self.lab, self.night = lab, night
        self._free = [lab.arena(f"search-candidate-{index}") for index in range(lab.settings.spares + candidates)]
        for arena in self._free:
            arena.fill(POISON)
        self._waiting: list[RemoteExecutor] = []
        self._at_once = lab.settings.device == "cpu"
        self._lock = threading.Lock()

    def refill(self) -> None:
        """On the CPU: starts what is missing, and does not wait for it."""
        if self._at_once:
            with self._lock:
                self._start_missing()

    def restock(self) -> None:
        """On a GPU: if no spare is left, starts as many as there may be, and waits for them. The caller holds the clock."""
        with self._lock:
            if not (self._at_once or self._waiting):
                self._start_missing()
                self._settle()

    def settle(self) -> None:
        """Waits until all spares have started."""
        with self._lock:
            self._settle()

    def _start_missing(self) -> None:
        """A machine that is short of something is asked again at the next trial."""
        while self._free and len(self._waiting) < self.lab.settings.spares:
            try:
                self._waiting.append(self.lab.spare(self._free[0], clock_held=not self._at_once))
            except (ProtocolError, OSError) as error:
                log_event(self.night, "no_worker", message=str(error))
                return
            self._free.pop(0)

    def _settle(self) -> None:
        for worker in self._waiting:
            with contextlib.suppress(CandidateError):  # seen again when it is taken
                self.lab.wait_ready(worker)

    def take(self) -> RemoteExecutor:
        """The oldest spare, attached; one that died meanwhile is replaced. Raises CandidateError when there is none."""
        for _ in range(TRIES):
            self.refill()
            worker = self._oldest() or self._restocked()
            if worker is None:
                time.sleep(1.0)
                continue
            with contextlib.suppress(CandidateError):
                self.lab.wait_ready(worker)
                if worker.alive:
                    return worker
            self.release(worker)
        raise CandidateError("exited", f"{TRIES} spare workers in a row ended before they were given the candidate")

    def _restocked(self) -> RemoteExecutor | None:
        if self._at_once:
            return None
        with self.lab.clock():
            self.restock()
        return self._oldest()

    def _oldest(self) -> RemoteExecutor | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def release(self, worker: RemoteExecutor) -> None:
        """Ends a worker that was taken; the next one on its arena finds none of its bytes."""
        self.lab.release(worker)
        worker.arena.fill(POISON)
        with self._lock:
            self._free.append(worker.arena)
