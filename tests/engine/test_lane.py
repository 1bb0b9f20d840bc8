"""The pipeline around a bench that only pretends: what begins when, and what becomes of it when something ends."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideforge.engine import lane as lanes
from tideforge.engine.config import Settings
from tideforge.engine.events import log_event, read_events
from tideforge.engine.forward import Forward
from tideforge.engine.lane import Lane
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.prepared import Prepared
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.trial_queue import TrialQueue
from tideforge.errors import ProtocolError

PATIENCE_S = 20.0


class Gate:
    """Where a trial waits until it may go on; who has come is seen."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.open: set[str] = set()
        self.changed = threading.Condition()

    def pass_through(self, name: str) -> None:
        with self.changed:
            self.came.append(name)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: name in self.open or "*" in self.open, PATIENCE_S)

    def let(self, *names: str) -> None:
        with self.changed:
            self.open |= set(names)
            self.changed.notify_all()

    def has(self, *names: str) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: set(names) <= set(self.came), PATIENCE_S)


@dataclasses.dataclass
class Night:
    """A queue of pretended trials and the lanes that take from it."""

    folder: Path
    queue: TrialQueue
    preparing: Gate
    measuring: Gate
    ends: dict[str, Callable[[Trial], Trial]]
    threads: list[threading.Thread] = dataclasses.field(default_factory=list)
    errors: list[Exception] = dataclasses.field(default_factory=list)

    def submit(self, *names: str) -> list[Trial]:
        return [self.queue.submit(Forward({"forward.py": f"# {name}\n"}), "slow", name) for name in names]

    def start(self, lookahead: int, exit_at: float | None = None) -> Lane:
        settings = Settings(self.folder / "s", self.folder, lookahead=lookahead)
        lane = Lane(ServiceConfig(settings, self.folder, self.folder, self.folder, exit_at=exit_at), self.queue)

        def run() -> None:
            try:
                lane.run(lambda bench: None)
            except Exception as error:
                self.errors.append(error)
                self.queue.blame(list(lane.mine.values()))

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return lane

    def outcomes(self) -> dict[str, Outcome | None]:
        return {trial.submitter: trial.outcome for trial in self.queue.archive.trials.values()}

    def is_over(self) -> bool:
        for thread in self.threads:
            thread.join(PATIENCE_S)
        return not any(thread.is_alive() for thread in self.threads)

    def eventually(self, condition: Callable[[], bool]) -> bool:
        with self.queue.changed:
            return self.queue.changed.wait_for(condition, PATIENCE_S)


def passed(trial: Trial) -> Trial:
    return dataclasses.replace(trial, outcome=Outcome.WRONG, message="measured", finished_at=time.time())


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Night(tmp_path, TrialQueue(tmp_path, tmp_path / "forwards"), Gate(), Gate(), {})

    class Pretender:
        def __init__(self, config: ServiceConfig) -> None:
            self.ahead = config.settings.ahead

        def prepare(self, trial: Trial, forward: Forward) -> Prepared:
            made.preparing.pass_through(trial.submitter)
            return Prepared(trial, forward)

        def measure(self, prepared: Prepared) -> Trial:
            made.measuring.pass_through(prepared.trial.submitter)
            return made.ends.get(prepared.trial.submitter, passed)(prepared.trial)

        def discard(self, prepared: Prepared) -> None:
            pass

        @property
        def staging(self) -> Any:
            return SimpleNamespace(abandon=lambda: made.preparing.let("*"))

        def close(self) -> None:
            pass

    monkeypatch.setattr(lanes, "Bench", Pretender)
    yield made
    made.preparing.let("*")
    made.measuring.let("*")
    made.queue.stop()
    assert made.is_over()


def test_trials_are_prepared_beside_the_one_that_is_measured(night: Night) -> None:
    night.submit("a", "b", "c", "d")
    night.preparing.let("a")
    night.start(lookahead=2)
    assert night.measuring.has("a") and night.preparing.has("b", "c")
    night.preparing.let("b", "c")
    assert night.queue.running == [next(iter(night.queue.archive.trials))]
    assert "d" not in night.preparing.came and night.measuring.came == ["a"]
    night.measuring.let("*")
    assert night.measuring.has("b", "c")
    night.preparing.let("d")
    assert night.eventually(lambda: night.queue.idle)
    assert sorted(night.measuring.came) == ["a", "b", "c", "d"] and night.measuring.came[-1] == "d"
    assert set(night.outcomes().values()) == {Outcome.WRONG}


def test_without_a_look_ahead_one_trial_ends_before_the_next_begins(night: Night) -> None:
    night.submit("a", "b")
    night.preparing.let("*")
    night.start(lookahead=0)
    assert night.measuring.has("a")
    assert night.preparing.came == ["a"] and len(night.queue.under_way) == 1
    night.measuring.let("*")
    assert night.eventually(lambda: night.queue.idle)
    ends = [event["event"] for event in read_events(night.folder)]
    assert ends == ["trial_start", "trial_end"] * 2


def test_one_that_hangs_while_it_is_prepared_delays_no_other(night: Night) -> None:
    night.submit("hangs", "b", "c", "d")
    night.preparing.let("b", "c", "d")
    night.measuring.let("*")
    night.start(lookahead=1)
    assert night.measuring.has("b", "c", "d")
    assert night.preparing.has("hangs") and "hangs" not in night.measuring.came
    night.preparing.let("hangs")
    assert night.eventually(lambda: night.queue.idle)
    assert night.measuring.came[-1] == "hangs"


def test_cancelling_ends_what_is_prepared_and_lets_the_measured_one_go_on(night: Night) -> None:
    night.submit("a", "b", "c", "d")
    night.preparing.let("a")
    night.start(lookahead=1)
    assert night.measuring.has("a") and night.preparing.has("b")
    night.preparing.let("b")
    assert night.queue.cancel("over") == 3
    night.measuring.let("*")
    assert night.eventually(lambda: night.queue.idle)
    assert night.outcomes() == {"a": Outcome.WRONG, **dict.fromkeys("bcd", Outcome.CANCELLED)}
    assert night.measuring.came == ["a"]


def test_stopping_finishes_what_runs_and_puts_the_rest_back(night: Night) -> None:
    night.submit("a", "b", "hangs", "d")
    night.preparing.let("a")
    night.start(lookahead=2)
    assert night.measuring.has("a") and night.preparing.has("b", "hangs")
    night.preparing.let("b")
    night.queue.stop()
    night.measuring.let("*")
    assert night.is_over() and not night.errors
    assert night.outcomes() == {"a": Outcome.WRONG, "b": None, "hangs": None, "d": None}
    again = TrialQueue(night.folder, night.folder / "forwards")
    assert [again.begun[trial.id] for trial in again.archive.waiting] == [0, 0, 0]
    with pytest.raises(ProtocolError, match="stopping"):
        night.submit("e")


def test_what_was_under_way_when_a_service_died_is_begun_again_alone(night: Night) -> None:
    first, second, _ = night.submit("a", "b", "c")
    for trial in (first, second):
        log_event(night.folder, "trial_start", trial=trial.id)
    night.queue.begun.update([first.id, second.id])
    assert TrialQueue(night.folder, night.folder / "forwards").begun == night.queue.begun
    night.preparing.let("*")
    night.start(lookahead=2)
    for name in ("a", "b"):
        assert night.measuring.has(name)
        assert night.preparing.came[-1] == name and len(night.queue.under_way) == 1
        night.measuring.let(name)
    night.measuring.let("*")
    assert night.eventually(lambda: night.queue.idle)
    assert night.measuring.came == ["a", "b", "c"]


def test_a_disputed_trial_is_measured_again_alone(night: Night) -> None:
    def disputed(trial: Trial) -> Trial:
        del night.ends["a"]
        return trial

    night.ends["a"] = disputed
    night.submit("a", "b", "c")
    night.preparing.let("*")
    night.measuring.let("*")
    night.start(lookahead=1)
    assert night.eventually(lambda: night.queue.idle)
    assert night.measuring.came.count("a") == 2 and set(night.outcomes().values()) == {Outcome.WRONG}


def test_a_forward_is_on_one_tier_at_a_time(night: Night) -> None:
    forward = Forward({"forward.py": "# both\n"})
    for tier in ("slow", "fast"):
        night.queue.submit(forward, tier, tier)
    night.preparing.let("*")
    night.start(lookahead=1)
    assert night.measuring.has("slow")
    assert night.preparing.came == ["slow"]
    night.measuring.let("*")
    assert night.eventually(lambda: night.queue.idle)


def test_a_lane_that_dies_leaves_its_trials_to_the_others(night: Night) -> None:
    def dies(trial: Trial) -> Trial:
        del night.ends["a"]
        raise ProtocolError("the keeper is gone")

    night.ends["a"] = dies
    night.submit("a", "b")
    night.preparing.let("*")
    night.start(lookahead=0)
    assert night.measuring.has("a")
    night.start(lookahead=0)
    assert night.measuring.has("b")
    night.measuring.let("*")
    assert night.eventually(lambda: night.queue.idle)
    assert [str(error) for error in night.errors] == ["the keeper is gone"]
    assert sorted(night.measuring.came) == ["a", "a", "b"] and set(night.outcomes().values()) == {Outcome.WRONG}


def test_an_idle_lane_ends_at_its_time(night: Night) -> None:
    night.submit("a")
    night.preparing.let("*")
    night.measuring.let("*")
    night.start(lookahead=1, exit_at=time.time() - 1)
    assert night.is_over() and night.outcomes() == {"a": Outcome.WRONG}
