"""Nights in which a process is killed in mid-search end as if nothing had happened: no trial lost, none counted twice."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tideforge.engine.outcome import Outcome, Trial
from tideforge.tasks.report import compute, read_report
from tideforge.tasks.search.session import sessions
from tideforge.tasks.store import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ID = "n1"


def clock_runs(state: Path) -> bool:
    """Whether the engine is timing a candidate: it holds the lock meanwhile."""
    with (state / "clock.lock").open("a") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    return True


@dataclasses.dataclass
class KilledNight:
    """A local night, its flow a process of its own, and what its files said when something was killed."""

    place: Any
    events: Callable[[Path, str], list[dict[str, Any]]]
    eventually: Callable[..., Any]
    flow: subprocess.Popen[str] | None = None

    @property
    def run(self) -> Run:
        return self.place.run(ID)

    def start(self) -> None:
        self.flow = self.place.started("recompile", "--run", ID, "--local", "--no-ship")

    def log(self) -> str:
        return (self.place.file.parent / "cli.log").read_text()[-3000:]

    def in_mid_search(self) -> None:
        """Until a trial is done and another one is being evaluated."""
        folder = self.run.folder

        def far() -> bool:
            assert self.flow is not None and self.flow.poll() is None, self.log()
            starts, ends = self.events(folder, "trial_start"), self.events(folder, "trial_end")
            return len(ends) >= 1 and len(starts) > len(ends)

        self.eventually("in mid-search", far, 120)

    def hold(self) -> tuple[int, int, str]:
        """Stops the incumbent's worker, so that one trial stays in the middle of its measurement.

        The pids of the incumbent's and of the candidate's worker, and the trial's id.
        """
        workers = [event["worker"] for event in self.events(self.run.folder, "worker_start")]
        os.kill(workers[0], signal.SIGSTOP)
        self.eventually("a trial is timed", lambda: clock_runs(self.place.state), 60)
        candidate = self.events(self.run.folder, "trial_worker")[-1]["worker"]
        return workers[0], candidate, self.events(self.run.folder, "trial_start")[-1]["trial"]

    def end(self) -> dict[str, Any]:
        """The report of the night once its flow has ended by itself."""
        assert self.flow is not None
        assert self.flow.wait(300) == 0, self.log()
        return read_report(self.run)

    def trial(self, name: str) -> Trial:
        return self.place.trials(ID)[name]


@pytest.fixture
def night(place: Any, events: Any, eventually: Any) -> Iterator[KilledNight]:
    raw = yaml.safe_load(place.file.read_text())
    raw["budget"]["search_s"] = 25  # a busy machine takes 10 s to start a worker
    place.file.write_text(yaml.safe_dump(raw))
    made = KilledNight(place, events, eventually)
    made.start()
    try:
        yield made
    finally:
        kill(made.flow)


def kill(flow: subprocess.Popen[str] | None) -> None:
    """SIGKILL to the flow's session: the flow itself and the Prefect server that it brought along."""
    assert flow is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(flow.pid, signal.SIGKILL)
    flow.wait()


def assert_each_counts_once(night: KilledNight, before: dict[str, bytes], facts: dict[str, Any]) -> None:
    after, trials = night.place.finished(ID), night.place.trials(ID)
    assert before and {name: after[name] for name in before} == before, "finished results stay as they were"
    assert len(after) > len(before), "the search went on"
    assert set(after) == set(trials), "every submission has a result"
    assert len({trial.forward for trial in trials.values()}) == len(trials)
    ends = [event["trial"] for event in night.events(night.run.folder, "trial_end")]
    assert len(set(ends)) == len(ends)
    listed = [raw["id"] for raw in night.run.read_json(night.run.need("search"), "trials")]
    assert sorted(listed) == sorted(after)
    assert facts["candidates"] == len(after)
    assert facts["outcomes"] == collections.Counter(str(trial.outcome) for trial in trials.values())
    assert facts["weight_loads"] == 1
    assert facts == compute(night.run)


def test_a_killed_incumbents_worker_is_replaced_and_the_candidate_not_blamed(night: KilledNight) -> None:
    night.in_mid_search()
    incumbent, _, name = night.hold()
    before = night.place.finished(ID)
    assert name not in before
    os.kill(incumbent, signal.SIGKILL)
    facts = night.end()
    assert_each_counts_once(night, before, facts)
    assert facts["service_starts"] == 1
    assert [event["worker"] for event in night.events(night.run.folder, "incumbent_died")] == [incumbent]
    assert "SIGKILL" not in night.trial(name).message
    assert night.trial(name).outcome is not Outcome.CRASHED


def test_a_killed_candidates_worker_ends_its_trial_and_no_other(night: KilledNight) -> None:
    night.in_mid_search()
    incumbent, candidate, name = night.hold()
    before = night.place.finished(ID)
    assert name not in before
    os.kill(candidate, signal.SIGKILL)
    os.kill(incumbent, signal.SIGCONT)
    facts = night.end()
    assert_each_counts_once(night, before, facts)
    assert facts["service_starts"] == 1
    died = {trial.id for trial in night.place.trials(ID).values() if "SIGKILL" in trial.message}
    assert died == {name} and night.trial(name).outcome is Outcome.CRASHED


def test_a_killed_service_goes_on_with_the_trial_it_was_at(night: KilledNight) -> None:
    night.in_mid_search()
    _, _, name = night.hold()
    before = night.place.finished(ID)
    assert name not in before
    os.kill(int((night.run.folder / "service.pid").read_text()), signal.SIGKILL)
    facts = night.end()
    assert_each_counts_once(night, before, facts)
    assert facts["service_starts"] == 2
    again = [event["trial"] for event in night.events(night.run.folder, "trial_start")]
    assert again.count(name) == 2 and night.trial(name).outcome not in (None, Outcome.CRASHED, Outcome.CANCELLED)


def test_a_killed_flow_goes_on_with_the_same_run_id(night: KilledNight) -> None:
    night.in_mid_search()
    before = night.place.finished(ID)
    service = (night.run.folder / "service.pid").read_text()
    prepared = {node: night.run.need(node) for node in ("ingest", "profile", "workload", "rank")}
    kill(night.flow)
    assert night.run.manifest("search") is None
    night.start()
    facts = night.end()
    assert_each_counts_once(night, before, facts)
    assert facts["service_starts"] == 1 and (night.run.folder / "service.pid").read_text() == service
    assert {node: night.run.need(node) for node in prepared} == prepared
    assert len(sessions(night.run)) == 2
