"""What an archive of trials holds, for people: of the engine started by hand or of a night. No engine has to run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tideforge.engine.archive import read_trials
from tideforge.engine.outcome import Trial
from tideforge.engine.setting import Setting
from tideforge.errors import UserError
from tideforge.tasks.by_hand import FOLDER, folder_in_use
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import runs_root
from tideforge.tasks.store import Run, checked


@dataclasses.dataclass(frozen=True)
class Listing:
    """An archive's trials: those of the setting that its engine was started with last, and all others."""

    folder: Path
    setting: Setting | None  # None: of an archive of before settings were written down
    present: list[Trial]
    others: list[Trial]


def trials(endpoint: Endpoint, run_id: str | None) -> Listing:
    """Of the named run, by hand or at night; else of the engine that runs; else of the newest one. From the archive on disk."""
    root = endpoint.state.resolve() / FOLDER
    if run_id is None:
        folder = folder_in_use(endpoint) or _newest(root)
    else:
        own = root / checked(run_id)
        folder = own if own.is_dir() else Run.open(runs_root(endpoint), run_id).folder
    if not (folder / "trials").is_dir():
        raise UserError(str(folder), "holds no trials", "submit a candidate first: tideforge engine submit FOLDER")
    found, setting = read_trials(folder), Setting.read(folder)
    name = setting.id if setting else ""
    present = [trial for trial in found if trial.setting == name]
    return Listing(folder, setting, present, [trial for trial in found if trial.setting != name])


def _newest(root: Path) -> Path:
    folders = [path for path in root.iterdir() if (path / "service.json").is_file()] if root.is_dir() else []
    if not folders:
        raise UserError(str(root), "no engine was ever started by hand", "start one: tideforge engine start")
    return max(folders, key=lambda path: (path / "service.json").stat().st_mtime)
