"""A lane: one device's bench and its pipeline. Several lanes take from one queue.

Threads prepare trials in order of submission, each in a worker of its own; the thread that calls `run` measures what is
ready, one trial at a time. So a candidate that takes long to import delays nobody whose turn could have come meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from tideforge.engine.evaluate import Bench
from tideforge.engine.events import log_event
from tideforge.engine.outcome import Trial
from tideforge.engine.prepared import Prepared
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.trial_queue import TrialQueue

LOOK_S = 1.0  # between two looks at the time


class Lane:
    """Under way are at most one trial that is measured and as many that are prepared as the settings look ahead."""

    def __init__(self, config: ServiceConfig, queue: TrialQueue) -> None:
        self.config, self.queue = config, queue
        self.mine: dict[str, Trial] = {}
        self._ready: list[Prepared] = []  # in order of submission
        self._over = False
        self._error: BaseException | None = None

    @property
    def device(self) -> str:
        return self.config.settings.device

    def run(self, on_ready: Callable[[Bench], None]) -> None:
        """Until the queue stops, or is idle after `exit_at`. Raises what its bench does not survive."""
        with contextlib.closing(Bench(self.config)) as bench:
            self.bench = bench
            on_ready(bench)
            threads = [threading.Thread(target=self._prepare, daemon=True) for _ in range(bench.ahead + 1)]
            for thread in threads:
                thread.start()
            try:
                while (prepared := self._next()) is not None:
                    self._leave(bench.measure(prepared))
            finally:
                self._end(threads)

    def _next(self) -> Prepared | None:
        """Of the prepared trials the one submitted first, if it is still wanted; None when the lane is over."""
        queue = self.queue
        while True:
            with queue.changed:
                queue.until(lambda: bool(self._ready) or self._error is not None or self._finished(), LOOK_S)
                if self._error is not None:
                    raise self._error
                if self._ready:
                    prepared = self._ready.pop(0)
                    if queue.wanted(prepared.trial):
                        queue.measured.add(prepared.trial.id)
                        return prepared
                elif self._finished():
                    return None
                else:
                    continue
            self._drop(prepared)

    def _finished(self) -> bool:
        if self.queue.stopping:
            return not any(map(self.queue.wanted, self.mine.values()))
        exit_at = self.config.exit_at
        return exit_at is not None and time.time() > exit_at and self.queue.idle

    def _prepare(self) -> None:
        """Of one of the threads that prepare."""
        try:
            while (trial := self._take()) is not None:
                self._begin(trial)
        except BaseException as error:
            with self.queue.changed:
                self._error = error
                self.queue.changed.notify_all()

    def _take(self) -> Trial | None:
        """The next trial, as soon as there is room for it; None when the lane is over."""
        with self.queue.changed:
            while not self._over:
                if len(self.mine) <= self.bench.ahead and (trial := self.queue.take()) is not None:
                    self.mine[trial.id] = trial
                    return trial
                self.queue.changed.wait(LOOK_S)
            return None

    def _begin(self, trial: Trial) -> None:
        if (refused := self.queue.refused(trial)) is not None:
            return self._leave(refused)
        log_event(self.queue.night, "trial_start", trial=trial.id)
        prepared = self.bench.prepare(trial, self.queue.archive.forward(trial))
        if self._over or not self.queue.wanted(trial):
            return self._drop(prepared)
        if prepared.done is not None:
            return self._leave(prepared.done)
        with self.queue.changed:
            self._ready.append(prepared)
            self._ready.sort(key=lambda one: one.trial.id)
            self.queue.changed.notify_all()

    def _leave(self, trial: Trial) -> None:
        with self.queue.changed:
            self.mine.pop(trial.id, None)
            self.queue.leave(trial)

    def _drop(self, prepared: Prepared) -> None:
        self.bench.discard(prepared)
        with self.queue.changed:
            self.mine.pop(prepared.trial.id, None)
            self.queue.put_back(prepared.trial)

    def _end(self, threads: list[threading.Thread]) -> None:
        """Whatever is still prepared ends now; what of it nobody cancelled waits for the next service."""
        with self.queue.changed:
            self._over = True
            self.queue.changed.notify_all()
        self.bench.staging.abandon()
        for thread in threads:
            thread.join()
        while self._ready:
            self._drop(self._ready.pop())
