"""The queue of a night: which trial begins next, which are under way, what became of each. Thread-safe."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tideforge.engine.archive import Archive
from tideforge.engine.events import log_event, read_events
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome, Trial
from tideforge.errors import CandidateError, ProtocolError

MAX_BEGINNINGS = 3  # of one trial: a candidate that the service does not survive must not hold up the others for ever


class TrialQueue:
    """`changed` is notified whenever anything here changes; holding it, several looks are one."""

    def __init__(self, night: Path, forwards: Path, setting: str = "") -> None:
        """`setting`: id of what its trials are measured against (setting.py)."""
        self.night, self.archive = night, Archive(night, forwards, setting, set_aside=True)
        for path in self.archive.damaged:
            log_event(night, "damaged", path=str(path))
        self.changed = threading.Condition()
        self.stopping = False
        self.under_way: dict[str, Trial] = {}  # in order of beginning
        self.measured: set[str] = set()  # of those, what a clock is for now
        self._alone: set[str] = set()  # to be begun only when nothing else is under way
        self._last: Collection[str] = ()  # once it stops: what is still finished
        self.begun = _beginnings(night)

    @property
    def running(self) -> list[str]:
        """Ids of trials that are measured; if none is, of the one that began first."""
        with self.changed:
            return sorted(self.measured) or [name for name in self.under_way if not self.archive.trials[name].done][:1]

    @property
    def idle(self) -> bool:
        with self.changed:
            return not self.under_way and not self.archive.waiting

    def submit(self, forward: Forward, tier: str, submitter: str) -> Trial:
        with self.changed:
            if self.stopping:
                raise ProtocolError("the service is stopping and takes no more candidates")
            trial = self.archive.submit(forward, tier, submitter)
            self.changed.notify_all()
            return trial

    def take(self) -> Trial | None:
        """The next trial to begin, which is under way from now on; None when none may begin now.

        A trial under which a service died, or that may have written weights, runs alone: what comes of that is its own doing.
        A forward is on one tier at a time, because its files are.
        """
        with self.changed:
            if self.stopping or any(map(self._runs_alone, self.under_way)):
                return None
            forwards = {trial.forward for trial in self.under_way.values()}
            for trial in self.archive.waiting:
                if trial.id in self.under_way or trial.forward in forwards:
                    continue
                if self.under_way and self._runs_alone(trial.id):
                    return None
                self.under_way[trial.id] = trial
                return trial
            return None

    def _runs_alone(self, name: str) -> bool:
        return name in self._alone or 0 < self.begun[name] < MAX_BEGINNINGS

    def refused(self, trial: Trial) -> Trial | None:
        """The end of a trial that is not begun: the service did not survive it, or somebody changed its source."""
        if (begun := self.begun[trial.id]) >= MAX_BEGINNINGS:
            message = f"the service ended {begun} times while this candidate ran; it is not tried again"
            return dataclasses.replace(trial, outcome=Outcome.CRASHED, message=message, finished_at=time.time())
        with contextlib.suppress(CandidateError, OSError, ValueError):
            if self.archive.forward(trial).id == trial.forward:
                return None
        message = "its source on disk is not what was submitted"
        return dataclasses.replace(trial, outcome=Outcome.REFUSED, message=message, finished_at=time.time())

    def wanted(self, trial: Trial) -> bool:
        """Whether a trial under way is still to be finished: not if it was cancelled, or when the service stops before it."""
        with self.changed:
            return not self.archive.trials[trial.id].done and (not self.stopping or trial.id in self._last)

    def leave(self, trial: Trial) -> None:
        """The end of a trial's way: with an outcome it is archived, without one it waits again, to be begun alone."""
        with self.changed:
            self.under_way.pop(trial.id, None)
            self.measured.discard(trial.id)
            wanted = not self.archive.trials[trial.id].done
            if trial.done and wanted:
                self.archive.finish(trial)
            elif wanted:
                self._alone.add(trial.id)
            self.changed.notify_all()
        if wanted:
            log_event(self.night, "trial_end" if trial.done else "trial_again", trial=trial.id, outcome=trial.outcome)

    def put_back(self, trial: Trial) -> None:
        """A trial that is given up in mid-way without fault: it waits again as if it had not begun."""
        with self.changed:
            self.under_way.pop(trial.id, None)
            self.measured.discard(trial.id)
            self.changed.notify_all()
        log_event(self.night, "trial_put_back", trial=trial.id)

    def blame(self, trials: Collection[Trial]) -> None:
        """Trials under which a device's bench died wait again; they count as begun."""
        with self.changed:
            for trial in trials:
                self.begun[trial.id] += 1
                self.under_way.pop(trial.id, None)
                self.measured.discard(trial.id)
            self.changed.notify_all()

    def cancel(self, message: str) -> int:
        """Ends all trials that are not running; how many."""
        with self.changed:
            count = self.archive.cancel_waiting(message, keep=self.running)
            self.changed.notify_all()
            return count

    def stop(self) -> None:
        """What runs is finished, nothing else."""
        with self.changed:
            self._last, self.stopping = self._last or self.running, True
            self.changed.notify_all()

    def until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `ready`, which is looked at when anything changes."""
        with self.changed:
            self.changed.wait_for(ready, timeout_s)


def _beginnings(night: Path) -> collections.Counter[str]:
    """How often each trial was begun and not put back."""
    begun: collections.Counter[str] = collections.Counter()
    for event in read_events(night):
        if event["event"] in ("trial_start", "trial_put_back"):
            begun[event["trial"]] += 1 if event["event"] == "trial_start" else -1
    return begun
