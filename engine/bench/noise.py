"""A against A: how often do trials of equal kernels claim a win, and how precise is a second on the device?

A part of its own, though the swap part's sources compute the same too: there a third runs another kernel, which may really
be faster or slower, and trials are short. Here every source differs by a comment, in fresh workers, under a night's rules.
"""

from __future__ import annotations

import math
import statistics

from tideforge.engine.bench import trials
from tideforge.engine.bench.job import TINY, Job, Load
from tideforge.engine.bench.report import Figure, Record, failures, quantile
from tideforge.engine.bench.running import Plan, running

LOAD = Load("llama-3.2-1b", users=1, prompt=32, output=128, passes=12)
TRIALS = 200
NOISE_TRIALS = 8  # as on a night on a GPU
TRIAL_S = 6.0


def measure(job: Job, record: Record) -> None:
    wanted = job.count(TRIALS, 4)
    if len(record.trials()) >= wanted:
        return
    with running(job, record, Plan(job.load(LOAD, TINY), noise_trials=NOISE_TRIALS)) as service:
        while len(record.trials()) < wanted and job.left_s > TRIAL_S:
            source = trials.variant(service.plain, len(record.trials()), False)
            record.add_trial(service.measured(source, "noise"))


def figures(record: Record) -> list[Figure]:
    found = [(r.trial.figures, r.trial.clock_s) for r in record.trials() if r.trial.figures]
    wins = sum(one.ci_low > 1 for one, _ in found)
    halves = [100 * (one.ci_high - one.ci_low) / 2 for one, _ in found if math.isfinite(one.ci_high)]
    logs = [100 * math.log(one.ratio) for one, _ in found]
    share = 100 * wins / len(found) if found else None
    rates = [
        100 * (one.ci_high - one.ci_low) / 2 * math.sqrt(clock_s)
        for one, clock_s in found
        if math.isfinite(one.ci_high)
    ]
    return [
        Figure("paired trials of equal kernels", len(found), "", "200"),
        failures("that did not pass", record.trials()),
        Figure("false wins", wins, "", "1"),
        Figure.at_most("share of false wins", share, "%", "0.5", 1, enough=len(found) >= TRIALS),
        Figure("false losses", sum(one.ci_high < 1 for one, _ in found), "", "1"),
        Figure("half-width, median", quantile(halves, 0.5), "%", "1.5: a 1 % noise floor is most of it"),
        Figure("time under the clock, median", quantile([clock for _, clock in found], 0.5), "s", "0.9"),
        Figure("half-width x sqrt(time)", quantile(rates, 0.5), "% sqrt(s)", "1.4"),
        Figure("spread of the ratios", statistics.stdev(logs) if len(logs) > 1 else None, "%", "0.7"),
    ]
