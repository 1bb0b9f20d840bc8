"""Experiments an hour with candidates always waiting, to a half-width of 1 %, beside one restart of vLLM an experiment.

Half-widths of both arms are of readings within one process. What processes of equal source differ by lastingly does not shrink
with time; the part `noise` shows what it adds.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from tideforge.engine.bench import beside, trials
from tideforge.engine.bench.job import SMALL, Job, Load
from tideforge.engine.bench.report import Figure, Reading, Record, failures
from tideforge.engine.bench.running import Plan, running

LOAD = Load("llama-3.2-1b", users=1, prompt=32, output=128, passes=12)
HALF_WIDTH = 0.01
TRIAL_S = 15.0  # on a GPU, so much time must be left for the trials that wait
TIERS = ("fast", "slow")


def measure(job: Job, record: Record) -> None:
    load, wanted = job.load(LOAD, SMALL), job.count(120, 3)
    if any(len(record.trials(tier)) < wanted for tier in TIERS):
        with running(job, record, Plan(load)) as service:
            for number, tier in enumerate(TIERS):
                first = trials.variant(service.plain, -service.run, False)
                record.add_trial(service.ended(service.submit(first, tier), "first"))  # it may start the tier
                have = len(record.trials(tier))
                # The second tier gets what time the first one leaves it, at least half.
                until = 0.0 if number else job.left_s / 2
                sources = (
                    trials.variant(service.plain, index, job.on_gpu and index % 3 == 2)
                    for index in itertools.count(have)
                )
                seconds = service.feed(
                    record,
                    itertools.islice(sources, max(0, wanted - have)),
                    tier,
                    itertools.repeat(tier),
                    lambda until=until: job.left_s > max(until, TRIAL_S if job.on_gpu else 0.0),  # type: ignore[misc]
                )
                record.add("stretch", tier=tier, seconds=seconds, trials=len(record.trials(tier)) - have)
    if job.on_gpu:
        beside.both(job, record, [load], repeats=8)


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds an experiment takes on a tier, all that it waits for counted."""

    trials: int
    seconds_each: float  # as measured
    more_s: float  # clock time that the median trial would need on top for a half-width of 1 %

    @property
    def at_one_percent_s(self) -> float:
        return self.seconds_each + self.more_s

    @property
    def an_hour(self) -> float:
        return 3600 / self.at_one_percent_s


def more_seconds(reading: Reading, half_width: float = HALF_WIDTH) -> float:
    """Half-widths fall with the root of time; a trial that was more precise than asked gets nothing back."""
    figures = reading.trial.figures
    if figures is None:
        return 0.0
    half = (figures.ci_high - figures.ci_low) / 2 / figures.ratio
    return reading.trial.clock_s * max(0.0, (half / half_width) ** 2 - 1)


def pace(record: Record, tier: str, readings: Sequence[Reading]) -> Pace | None:
    stretches = [line for line in record.of("stretch") if line["tier"] == tier and line["trials"]]
    if not stretches or not readings:
        return None
    each = sum(line["seconds"] for line in stretches) / sum(line["trials"] for line in stretches)
    return Pace(len(readings), each, statistics.median(map(more_seconds, readings)))


def figures(record: Record) -> list[Figure]:
    found: list[Figure] = []
    users = LOAD.users
    for tier, cold, goal, predicted in (("fast", True, 252.0, "2,000 an hour, 40 times"),
                                        ("slow", False, 50.0, "2,800 an hour, 28 times")):  # fmt: skip
        readings = record.trials(tier)
        own, other = pace(record, tier, readings), beside.started(record, cold)
        theirs = other.first_token_s + other.seconds_to(HALF_WIDTH, users) if other else None
        start = ("empty" if cold else "filled") + (other.within(record) if other else "")
        found += [
            Figure(f"{tier} tier: trials", len(readings), "", "120"),
            failures(f"{tier} tier: that did not pass", readings),
            Figure(f"{tier} tier: seconds each", own.seconds_each if own else None, "s", "1.3"),
            Figure(f"{tier} tier: more, to 1 %", own.more_s if own else None, "s", "0.5"),
            Figure(f"{tier} tier: experiments", own.an_hour if own else None, "an hour", predicted),
            Figure(f"vLLM, {start} caches: an experiment", theirs, "s", "72" if cold else "37"),
            Figure.at_least(
                f"{tier} tier / vLLM with {start} caches", theirs / own.at_one_percent_s if own and theirs else None,
                "times", predicted.split(", ")[-1].split()[0], goal,
            ),
        ]  # fmt: skip
    return found
