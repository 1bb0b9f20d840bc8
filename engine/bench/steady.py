"""Many swaps of different sources in short trials: does memory stay flat, is the last worker as fast as the first?"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from tideforge.engine.bench import trials
from tideforge.engine.bench.job import TINY, Job, Load
from tideforge.engine.bench.report import Figure, Reading, Record, failures
from tideforge.engine.bench.running import Plan, running

LOAD = Load("llama-3.2-1b", users=1, prompt=32, output=17, passes=1)
SETTLED = 20  # readings of each run that are left out of a slope: the first trials fill caches and pools
SWAPS = 1000
EDGE = 50
TRIAL_S = 5.0
FLAT = 3.0  # standard errors that a slope is known to


def measure(job: Job, record: Record) -> None:
    wanted = job.count(SWAPS, 6)
    if len(record.trials()) >= wanted:
        return
    with running(job, record, Plan(job.load(LOAD, TINY))) as service:
        before = len(record.trials())
        while len(record.trials()) < wanted and job.left_s > TRIAL_S:
            index = len(record.trials())
            kernel = job.on_gpu and index % 3 == 2
            record.add_trial(service.measured(trials.variant(service.plain, index, kernel), "steady"))
            if job.on_gpu and len(record.trials()) == before + SETTLED:
                record.add("idle", run=service.run, swaps=before + SETTLED, device_mib=service.idle_mib())
        if job.on_gpu:
            record.add("idle", run=service.run, swaps=len(record.trials()), device_mib=service.idle_mib())


@dataclasses.dataclass(frozen=True)
class Slope:
    """Change a trial, with its standard error."""

    value: float
    error: float

    @property
    def text(self) -> str:
        return f"{self.value:+.4g} +- {self.error:.2g}"

    def within(self, limit: float) -> bool | None:
        """Whether it is at most `limit`, either way; None where the readings are too noisy to say."""
        low, high = abs(self.value) - FLAT * self.error, abs(self.value) + FLAT * self.error
        return True if high <= limit else False if low > limit else None


def slope(runs: Sequence[Sequence[float]]) -> Slope | None:
    """Least squares over all runs of the service, each with a level of its own. None for fewer than three readings."""
    points: list[tuple[float, float]] = []
    for values in runs:
        middle = (len(values) - 1) / 2
        points += [(at - middle, value - statistics.fmean(values)) for at, value in enumerate(values)]
    freedom, squares = len(points) - len(runs) - 1, sum(x * x for x, _ in points)
    if freedom < 1 or squares == 0:
        return None
    value = sum(x * y for x, y in points) / squares
    rest = sum((y - value * x) ** 2 for x, y in points) / freedom
    return Slope(value, math.sqrt(rest / squares))


def by_run(readings: Sequence[Reading]) -> list[list[Reading]]:
    """In order, without the first few of each run."""
    runs = [[r for r in readings if r.run == run] for run in sorted({r.run for r in readings})]
    return [run[min(SETTLED, len(run) // 4) :] for run in runs]


def idle_growth(record: Record) -> float | None:
    """MiB a swap between the readings of each run in which nothing ran: what spares on their way up add is not in it."""
    grown = swaps = 0.0
    for run in {line["run"] for line in record.of("idle")}:
        lines = [line for line in record.of("idle") if line["run"] == run]
        grown += lines[-1]["device_mib"] - lines[0]["device_mib"]
        swaps += lines[-1]["swaps"] - lines[0]["swaps"]
    return grown / swaps if swaps else None


def edges(runs: Sequence[Sequence[Reading]], value: Callable[[Reading], float]) -> float | None:
    """Median of the last readings over the median of the first ones, of each run (at most 50 a side)."""
    first: list[float] = []
    last: list[float] = []
    for run in runs:
        passed = [value(reading) for reading in run if reading.passed]
        few = min(EDGE, len(passed) // 2)
        first += passed[:few]
        last += passed[len(passed) - few :]
    return statistics.median(last) / statistics.median(first) if first and statistics.median(first) else None


def tokens_per_s(reading: Reading) -> float:
    assert reading.trial.figures is not None
    return reading.trial.figures.candidate_tps


def figures(record: Record) -> list[Figure]:
    readings = record.trials()
    runs = by_run(readings)
    found = [
        Figure("swaps", len(readings), "", "1,000"),
        failures("that did not pass", readings),
        Figure("starts of the service among them", len(runs), "", "2"),
    ]
    for name, unit, prediction, limit in (
        ("device_mib", "MiB a swap", "0 within 0.05", 0.05), ("host_mib", "MiB a swap", "+0.01: the archive grows", 0.05),
        ("descriptors", "a swap", "0", 0.01), ("threads", "a swap", "0", 0.01),
    ):  # fmt: skip
        got = slope([[float(getattr(r, name)) for r in run] for run in runs])
        text, met = (got.text, got.within(limit)) if got else (None, None)
        goal = f"<= {limit:g} with {FLAT:g} standard errors"
        found.append(Figure(f"slope of {name}", text, unit, prediction, goal, met if len(readings) >= SWAPS else None))
        values = [getattr(r, name) for r in readings]
        found.append(
            Figure(f"{name}, least to most", f"{min(values):g} to {max(values):g}" if values else None, "", "")
        )
    found.append(Figure("device_mib while idle, a swap", idle_growth(record), "MiB", "0 within 0.01"))
    found.append(Figure("tokens/s, last / first 50", edges(runs, tokens_per_s), "times", "1.00 within 0.02"))
    found.append(Figure("swap time, last / first 50", edges(runs, lambda r: r.swap_s), "times", "1.0 within 0.1"))
    return found
