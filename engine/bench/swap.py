"""What a swap costs: submitted source to first timed step, of different sources, one after another, with empty caches.

Beside it, in the same part, restarts: of this engine (keeper, service, incumbent, reference, from nothing) and of vLLM.
"""

from __future__ import annotations

import statistics

from tideforge.engine.bench import beside, trials
from tideforge.engine.bench.job import TINY, Job, Load
from tideforge.engine.bench.report import Figure, Reading, Record, failures, quantile
from tideforge.engine.bench.running import Plan, running
from tideforge.engine.outcome import Trial

LOAD = Load("llama-3.2-1b", users=1, prompt=32, output=128, passes=2)
SOURCES = 200
RESTARTS = 3
TRIAL_S = 5.0  # a trial begins only while so much time is left


def measure(job: Job, record: Record) -> None:
    plan, wanted = Plan(job.load(LOAD, TINY)), job.count(SOURCES, 5)
    restarts = RESTARTS if job.on_gpu else 1
    while job.left_s > TRIAL_S and (len(record.of("restart")) < restarts or len(swaps(record)) < wanted):
        with running(job, record, plan) as service:
            first = service.measured(trials.variant(service.plain, -service.run, False), "first")
            record.add_trial(first)
            record.add("restart", seconds=first.turn_at + first.trial.swap_s - service.started_at)
            if len(record.of("restart")) < restarts:
                continue  # a service of its own for each restart
            while len(swaps(record)) < wanted and job.left_s > TRIAL_S:
                index = len(swaps(record))
                kernel = job.on_gpu and index % 3 == 2
                source = trials.variant(service.plain, index, kernel)
                record.add_trial(service.measured(source, "swap kernel" if kernel else "swap plain"))
    if job.on_gpu:
        beside.both(job, record, [job.load(LOAD, TINY)])


def swaps(record: Record) -> list[Reading]:
    return record.trials("swap")


def figures(record: Record) -> list[Figure]:
    plain, kernel = ([r.swap_s for r in record.trials(f"swap {kind}") if r.passed] for kind in ("plain", "kernel"))
    restarts = [line["seconds"] for line in record.of("restart")]
    own = statistics.median(restarts) if restarts else None
    swap, enough = quantile(plain, 0.5), len(swaps(record)) >= SOURCES
    found = [
        Figure("sources", len(swaps(record)), "", "200, of them 67 with a new kernel"),
        failures("that did not pass", swaps(record)),
        Figure.at_most("no new kernel, median", swap, "s", "0.45", 0.5, enough),
        Figure.at_most("no new kernel, P99", quantile(plain, 0.99), "s", "0.9", 0.5, enough),
        Figure.at_most("a new kernel, median", quantile(kernel, 0.5), "s", "0.9", 3, enough),
        Figure.at_most("a new kernel, P99", quantile(kernel, 0.99), "s", "2.0", 3, enough),
        Figure("restart of this engine", own, "s", "22"),
        Figure("restart / swap", _over(own, swap), "times", "50"),
    ]
    for part in ("stage_s", "check_s", "capture_s"):
        values = [getattr(r.trial, part) for r in swaps(record) if r.passed]
        found.append(Figure(f"of a trial: {part[:-2]}, median", quantile(values, 0.5), "s", PARTS[part]))
    for cold, prediction, times in (
        (True, "70", "52; Together Compiler reports 467 s / 9.0 s = 52"),
        (False, "35", ""),
    ):
        one, name = beside.started(record, cold), f"vLLM's restart, {'empty' if cold else 'filled'} caches"
        name += one.within(record) if one else ""
        seconds = one.first_token_s if one else None
        found.append(Figure(name, seconds, "s", prediction))
        found.append(Figure(f"{name} / swap", _over(seconds, swap), "times", "155" if cold else "80", times))
    return found + _gates([r.trial for r in swaps(record)], enough)


def _gates(done: list[Trial], enough: bool) -> list[Figure]:
    """What the cheap gates took of a search: the service asks them of would-be finalists, and of others that gain as its share allows."""
    passed = [trial for trial in done if trial.figures is not None]
    climbs = [trial.gates_s for trial in done if trial.gates_s]
    device_s, each = sum(trial.device_s for trial in done), quantile(climbs, 0.5)
    without = device_s - sum(climbs)
    gained = sum(trial.figures.ci_low > 1 for trial in passed if trial.figures)
    found = [
        Figure.at_most("cheap gates, of the device's seconds", 100 * sum(climbs) / device_s if done else None, "%", "15", 20, enough),
        Figure("trials that climbed", len(climbs), f"of {gained} that gained", "50"),
        Figure("a climb, median", each, "s", "0.35"),
    ]  # fmt: skip
    if each is not None:
        every = each * len(passed)
        found.append(Figure("cheap gates, had all that passed climbed", 100 * every / (without + every), "%", "35"))
    return found


PARTS = {"stage_s": "0.02", "check_s": "0.3", "capture_s": "0.05"}


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
