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
    """

    def __init__(self, lab: Lab, candidates: int, night: Path) -> None:
        """`candidates`: how many may be under way at once. `night`: the folder whose events say what could not be started."""
        self.lab, self.night = lab, night
        self._free = [lab.arena(f"search-candidate-{index}") for index in range(lab.settings.spares + candidates)]
        for arena in self._free:
            arena.fill(POISON)
        self._waiting: list[RemoteExecutor] = []
        self._lock = threading.Lock()

    def refill(self) -> None:
        """Starts the spares that are missing; a machine that is short of something is asked again at the next trial."""
        with self._lock:
            while self._free and len(self._waiting) < self.lab.settings.spares:
                try:
                    self._waiting.append(self.lab.spare(self._free[0]))
                except (ProtocolError, OSError) as error:
                    log_event(self.night, "no_worker", message=str(error))
                    return
                self._free.pop(0)

    def settle(self) -> None:
        """Waits until all spares have started. Not while another thread may take one."""
        for worker in self._waiting:
            with contextlib.suppress(CandidateError):  # seen again when it is taken
                self.lab.wait_ready(worker)

    def take(self) -> RemoteExecutor:
        """The oldest spare, attached; one that died meanwhile is replaced. Raises CandidateError when there is none."""
        for _ in range(TRIES):
            self.refill()
            worker = self._oldest()
            if worker is None:
                time.sleep(1.0)
                continue
            with contextlib.suppress(CandidateError):
                self.lab.wait_ready(worker)
                if worker.alive:
                    return worker
            self.release(worker)
        raise CandidateError("exited", f"{TRIES} spare workers in a row ended before they were given the candidate")

    def _oldest(self) -> RemoteExecutor | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def release(self, worker: RemoteExecutor) -> None:
        """Ends a worker that was taken; the next one on its arena finds none of its bytes."""
        self.lab.release(worker)
        worker.arena.fill(POISON)
        with self._lock:
            self._free.append(worker.arena)
