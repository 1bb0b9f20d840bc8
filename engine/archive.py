"""Queue and archive on disk: one folder a trial. The file system is the database, so both survive any restart.

`<night>/trials/<id>/submission.json` is there from the submission on, `result.json` once the trial is done. Each is written under a
temporary name and renamed. The id is a running number and the head of the forward's hash; the same forward on the same tier
under the same setting (setting.py) is the same trial, so that nothing is counted twice.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection
from pathlib import Path

from tideforge.data.files import set_aside as aside
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome, Trial
from tideforge.errors import UserError


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
    """All trials of a night, in order of submission; sources go to `forwards`. Not thread-safe: called under a lock.

    `setting` is the id of what new trials are measured against. Those of another one are kept, but nobody is given them for
    theirs, and of them none waits: they wait for an engine of their setting.
    """

    def __init__(self, night: Path, forwards: Path, setting: str = "", set_aside: bool = False) -> None:
        """Raises UserError at a damaged file; with `set_aside` it is renamed instead, and a trial with a submission waits."""
        self.root, self.forwards, self.setting = night / "trials", forwards, setting
        self.damaged: list[Path] = []  # that were set aside, under their new names
        self.root.mkdir(parents=True, exist_ok=True)
        self.trials: dict[str, Trial] = {}
        for folder in sorted(self.root.iterdir()):
            for name in ("result.json", "submission.json"):
                if (trial := self._read(folder / name, set_aside)) is not None:
                    self.trials[folder.name] = trial
                    break
        self._known = {(trial.forward, trial.tier): trial.id for trial in self.present}
        numbers = [name for path in self.root.iterdir() if (name := path.name.partition("-")[0]).isdecimal()]
        self._next = 1 + max(map(int, numbers), default=-1)  # of folders without a trial too: no name is given twice

    def _read(self, path: Path, set_aside: bool) -> Trial | None:
        if not path.exists():
            return None
        try:
            return Trial.read(path)
        except UserError:
            if not set_aside:
                raise
            self.damaged.append(aside(path))
            return None

    @property
    def present(self) -> list[Trial]:
        """Those of the setting."""
        return [trial for trial in self.trials.values() if trial.setting == self.setting]

    @property
    def waiting(self) -> list[Trial]:
        return [trial for trial in self.present if not trial.done]

    def submit(self, forward: Forward, tier: str, submitter: str) -> Trial:
        """Puts a forward into the queue; one that the setting knows returns its trial."""
        known = self._known.get((forward.id, tier))
        if known is not None:
            return self.trials[known]
        name = f"{self._next:06d}-{forward.id[:12]}"
        trial = Trial(name, forward.id, tier, submitter, time.time(), setting=self.setting)
        forward.save(self.forwards)
        folder = self.root / trial.id
        folder.mkdir(exist_ok=True)
        write_atomic(folder / "submission.json", trial.to_json())
        self.trials[trial.id] = trial
        self._known[forward.id, tier] = trial.id
        self._next += 1
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
    """All trials of a night, of every setting, for reports. UserError names a damaged file."""
    return list(Archive(night, night / "forwards").trials.values())
