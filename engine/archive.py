"""Queue and archive on disk: one folder a trial. The file system is the database, so both survive any restart.

`<night>/trials/<id>/submission.json` is there from the submission on, `result.json` once the trial is done. Each is written under a
temporary name and renamed. The id is a running number and the head of the forward's hash; the same forward on the same tier
is the same trial, so that nothing is counted twice.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection
from pathlib import Path

from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome, Trial


def write_atomic(path: Path, text: str) -> None:
    """Old bytes or new bytes, never half of them. Raises OSError when the disk is full; nothing is left behind then."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class Archive:
    """All trials of a night, in order of submission; sources go to `forwards`. Not thread-safe: called under a lock."""

    def __init__(self, night: Path, forwards: Path) -> None:
        self.root, self.forwards = night / "trials", forwards
        self.root.mkdir(parents=True, exist_ok=True)
        self.trials: dict[str, Trial] = {}
        for folder in sorted(self.root.iterdir()):
            for name in ("result.json", "submission.json"):
                if (folder / name).exists():
                    self.trials[folder.name] = Trial.read(folder / name)
                    break
        self._known = {(trial.forward, trial.tier): trial.id for trial in self.trials.values()}

    @property
    def waiting(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if not trial.done]

    def submit(self, forward: Forward, tier: str, submitter: str) -> Trial:
        """Puts a forward into the queue; a known one returns its trial."""
        known = self._known.get((forward.id, tier))
        if known is not None:
            return self.trials[known]
        trial = Trial(f"{len(self.trials):06d}-{forward.id[:12]}", forward.id, tier, submitter, time.time())
        forward.save(self.forwards)
        folder = self.root / trial.id
        folder.mkdir(exist_ok=True)
        write_atomic(folder / "submission.json", trial.to_json())
        self.trials[trial.id] = trial
        self._known[forward.id, tier] = trial.id
        return trial

    def finish(self, trial: Trial) -> None:
        """Stores a trial's result, once."""
        assert trial.done
        (self.root / trial.id).mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        write_atomic(self.root / trial.id / "result.json", trial.to_json())
        self.trials[trial.id] = trial

    def cancel_waiting(self, message: str, keep: Collection[str] = ()) -> int:
        """Ends all waiting trials but `keep` (those that run); how many."""
        waiting = [trial for trial in self.waiting if trial.id not in keep]
        for trial in waiting:
            self.finish(dataclasses.replace(trial, outcome=Outcome.CANCELLED, message=message, finished_at=time.time()))
        return len(waiting)

    def forward(self, trial: Trial) -> Forward:
        return Forward.load(self.forwards / trial.forward)


def read_trials(night: Path) -> list[Trial]:
    """All trials of a night, for reports."""
    return list(Archive(night, night / "forwards").trials.values())
