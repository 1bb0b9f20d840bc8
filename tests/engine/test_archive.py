from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from tideforge.engine.archive import Archive, read_trials, write_atomic
from tideforge.engine.events import read_events
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.trial_queue import TrialQueue
from tideforge.errors import CandidateError, UserError

A, B = Forward({"forward.py": "a = 1\n"}), Forward({"forward.py": "b = 2\n"})


def archive(tmp_path) -> Archive:
    return Archive(tmp_path, tmp_path / "forwards")


def test_the_same_forward_on_the_same_tier_is_one_trial(tmp_path):
    one = archive(tmp_path)
    assert one.submit(A, "slow", "x").id == one.submit(A, "slow", "y").id != one.submit(A, "fast", "x").id
    assert len(one.waiting) == 2


def test_queue_and_results_survive_a_restart(tmp_path):
    before = archive(tmp_path)
    first, second = before.submit(A, "slow", "x"), before.submit(B, "slow", "x")
    before.finish(dataclasses.replace(first, outcome=Outcome.WRONG, message="m", finished_at=1.0))
    after = archive(tmp_path)
    assert [trial.id for trial in after.waiting] == [second.id]
    assert after.trials[first.id].outcome is Outcome.WRONG
    assert after.submit(A, "slow", "z").done
    assert after.forward(second) == B
    assert [trial.id for trial in read_trials(tmp_path)] == [first.id, second.id]


def test_a_result_torn_by_a_full_disk_is_not_there(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "result.json", "half")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["", '{"id": ', "[]", "{}", '{"id": 1, "no_such_field": 2}'])
@pytest.mark.parametrize("name", ["result.json", "submission.json"])
def test_a_damaged_file_is_named_to_readers_and_set_aside_by_the_service(tmp_path, damage, name):
    before = archive(tmp_path)
    good, bad = before.submit(A, "slow", "x"), before.submit(B, "slow", "x")
    before.finish(dataclasses.replace(good, outcome=Outcome.WRONG, message="m", finished_at=1.0))
    path = tmp_path / "trials" / bad.id / name
    path.write_text(damage)
    with pytest.raises(UserError, match=f"{bad.id}/{name}: is damaged"):
        read_trials(tmp_path)
    queue = TrialQueue(tmp_path, tmp_path / "forwards")
    assert queue.archive.trials[good.id].outcome is Outcome.WRONG
    assert [trial.id for trial in queue.archive.waiting] == ([bad.id] if name == "result.json" else [])
    aside = path.with_name(f"{name}.damaged")
    assert aside.read_text() == damage and not path.exists()
    assert [event["path"] for event in read_events(tmp_path) if event["event"] == "damaged"] == [str(aside)]
    assert queue.submit(B, "slow", "x").id.endswith(B.id[:12])


def test_cancelling_spares_the_running_trial(tmp_path):
    one = archive(tmp_path)
    running, waiting = one.submit(A, "slow", "x"), one.submit(B, "slow", "x")
    assert one.cancel_waiting("over", keep=[running.id]) == 1
    assert one.trials[waiting.id].outcome is Outcome.CANCELLED and not one.trials[running.id].done


def test_figures_exist_exactly_when_passed():
    with pytest.raises(ValueError, match="exactly when it passed"):
        Trial("1", "f", "slow", "x", 0.0, outcome=Outcome.PASSED)


def test_a_forwards_id_covers_every_file_and_name():
    ids = {f.id for f in (A, B, A.with_file("knobs.json", "{}"), Forward({"forward.py": "a = 1\n", "x.py": ""}))}
    assert len(ids) == 4


@pytest.mark.parametrize(
    "files", [{}, {"forward.py": "", "../x.py": ""}, {"forward.py": "", "/x.py": ""}, {"forward.py": "", "a.so": ""}]
)
def test_bundles_that_reach_outside_are_refused(files):
    with pytest.raises(CandidateError):
        Forward(files)


def test_a_saved_forward_that_somebody_changed_is_written_again(tmp_path: Path) -> None:
    forward = Forward({"forward.py": "def build(ctx): ...\n", "knobs.json": "{}"})
    folder = forward.save(tmp_path)
    assert forward.save(tmp_path) == folder and Forward.load(folder) == forward
    for name, text in (("forward.py", "raise SystemExit"), ("math.so", "another one's"), ("more.py", "")):
        (folder / name).write_text(text)
        assert {path.name for path in forward.save(tmp_path).iterdir()} == {"forward.py", "knobs.json"}
        assert Forward.load(folder) == forward
