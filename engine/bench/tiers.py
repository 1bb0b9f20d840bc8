"""Both tiers against the slow tier alone, on an 8B dense and a 30B-A3B mixture of experts, and how well they agree.

Every candidate is measured on both tiers, since agreement needs that; what a search would pay follows from the paces: all of
them on the fast tier, the best one in twenty on the slow one. Weights are random, made in place on the device.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from tideforge.engine import agreement
from tideforge.engine.bench import trials, variants
from tideforge.engine.bench.experiments import Pace, pace
from tideforge.engine.bench.job import SMALL, Job, Load
from tideforge.engine.bench.report import Figure, Reading, Record, failures, quantile
from tideforge.engine.bench.running import Plan, Running, running

LOADS = (
    Load("qwen3-8b", users=8, prompt=256, output=64, passes=6, num_blocks=1024, on_disk=False),
    Load("qwen3-30b-a3b", users=8, prompt=256, output=64, passes=6, num_blocks=1024, forward="moe", on_disk=False),
)
PROMOTED = 0.05  # of the candidates, that a search would send on to the slow tier
TOP = 3
TIERS = ("fast", "slow")
TRIAL_S = 20.0  # so much time must be left for the trials that wait
START_S = 150.0  # so much time must be left for a service of a large model and a few trials
NOISE_TRIALS = 8
FEW = 6  # candidates on the CPU
GAIN = 8.1


def measure(job: Job, record: Record) -> None:
    for load in LOADS if job.on_gpu else (SMALL,):
        if job.left_s > (START_S if job.on_gpu else 0) and any(missing(job, record, load, tier) for tier in TIERS):
            with running(job, record, Plan(load)) as service:
                _measure(job, record, load, service)


def margin_s(job: Job) -> float:
    return TRIAL_S if job.on_gpu else 0.0


def missing(job: Job, record: Record, load: Load, tier: str) -> bool:
    """Whether a tier still lacks candidates; how many there are is known once a service has run."""
    known = record.last(f"candidates {load.shape}")
    return known is None or len(record.trials(f"{tier} {load.shape} ")) < known["count"]


def _measure(job: Job, record: Record, load: Load, service: Running) -> None:
    candidates = variants.honest(service.plain)[: job.trials or (None if job.on_gpu else FEW)]
    record.add(f"candidates {load.shape}", count=len(candidates))
    for tier in TIERS:
        done = {reading.label for reading in record.trials(f"{tier} {load.shape} ")}
        left = [(name, source) for name, source in candidates if f"{tier} {load.shape} {name}" not in done]
        if not left or job.left_s < margin_s(job):
            continue
        if tier == "slow":
            _noise(job, record, load, service)
        # The first trial of a tier may start it; it is the unchanged source.
        record.add_trial(service.ended(service.submit(service.plain, tier), f"first {tier} {load.shape}"))
        labels = [f"{tier} {load.shape} {name}" for name, _ in left]
        before = len(record.trials(f"{tier} {load.shape} "))
        seconds = service.feed(record, [source for _, source in left], tier, labels, lambda: job.left_s > margin_s(job))
        made = len(record.trials(f"{tier} {load.shape} ")) - before
        record.add("stretch", tier=f"{tier} {load.shape}", seconds=seconds, trials=made)


def _noise(job: Job, record: Record, load: Load, service: Running) -> None:
    """Trials of equal kernels in fresh workers: what the slow tier cannot tell apart."""
    label = f"noise {load.shape}"
    sources = (trials.variant(service.plain, 1000 * service.run + index, False) for index in itertools.count())
    wanted = (NOISE_TRIALS if job.on_gpu else 2) - len(record.trials(label))
    service.feed(
        record,
        itertools.islice(sources, max(0, wanted)),
        "slow",
        itertools.repeat(label),
        lambda: job.left_s > margin_s(job),
    )


def ratios(readings: Sequence[Reading]) -> dict[str, tuple[float, float]]:
    """Ratio and half-width of each candidate that passed, by its name."""
    return {
        reading.label.split(" ", 2)[2]: (figures.ratio, (figures.ci_high - figures.ci_low) / 2)
        for reading in readings
        if (figures := reading.trial.figures)
    }


def together_s(fast: Pace, slow: Pace) -> float:
    """Seconds a candidate when all are screened and the best one in twenty goes on."""
    return fast.at_one_percent_s + PROMOTED * slow.at_one_percent_s


def figures(record: Record) -> list[Figure]:
    shapes = [
        line["kind"].removeprefix("candidates ") for line in record.lines if line["kind"].startswith("candidates")
    ]
    return [figure for shape in dict.fromkeys(shapes) for figure in _of_shape(record, shape)]


def _of_shape(record: Record, shape: str) -> list[Figure]:
    fast_trials, slow_trials = (record.trials(f"{tier} {shape} ") for tier in TIERS)
    fast, slow = (pace(record, f"{tier} {shape}", record.trials(f"{tier} {shape} ")) for tier in TIERS)
    both = together_s(fast, slow) if fast and slow else None
    seconds = [r.ended_at - r.turn_at - r.trial.lock_s for r in slow_trials]  # others were measured meanwhile
    return [
        Figure(f"{shape}: candidates on both tiers", len(set(ratios(fast_trials)) & set(ratios(slow_trials))), "", "24"),
        failures(f"{shape}: that did not pass", fast_trials + slow_trials),
        Figure(f"{shape}: a fast trial", fast.at_one_percent_s if fast else None, "s, to 1 %", "2"),
        Figure(f"{shape}: a slow trial", slow.at_one_percent_s if slow else None, "s, to 1 %", "5"),
        Figure.at_most(f"{shape}: a slow trial from turn to end without its wait for others, most", quantile(seconds, 1.0), "s", "5", 10),
        Figure(f"{shape}: promoted share, as the search's policy has it", PROMOTED, "", ""),
        Figure(f"{shape}: both tiers together", 3600 / both if both else None, "experiments an hour", "1,600"),
        Figure(f"{shape}: the slow tier alone", slow.an_hour if slow else None, "experiments an hour", "720"),
        Figure.at_least(
            f"{shape}: together / slow alone", slow.at_one_percent_s / both if both and slow else None, "times", "2.2", GAIN
        ),
        *_agreement(shape, ratios(fast_trials), ratios(slow_trials), record.trials(f"noise {shape}")),
    ]  # fmt: skip


def _agreement(
    shape: str,
    fast: dict[str, tuple[float, float]],
    slow: dict[str, tuple[float, float]],
    equal: Sequence[Reading],
) -> list[Figure]:
    names = sorted(set(fast) & set(slow))
    logs = [math.log(figures.ratio) for reading in equal if (figures := reading.trial.figures)]
    if len(names) < 2:
        return []
    spread, floor = [slow[name][0] for name in names], agreement.floor_of(logs)
    both = [agreement.Both(name, fast[name][0], slow[name][0]) for name in names]
    found = agreement.agreement(both, floor, TOP)
    return [
        Figure(f"{shape}: ratios on the slow tier", f"{min(spread):.2f} to {max(spread):.2f}", "", "0.85 to 1.15",
               "within 0.8 to 1.3", min(spread) >= 0.8 and max(spread) <= 1.3),
        Figure(f"{shape}: half-width on the slow tier", 100 * statistics.median(slow[n][1] for n in names), "%", "1.0"),
        Figure(f"{shape}: noise floor of {len(logs)} trials of equal kernels", 100 * floor, "%", "1.5"),
        Figure(f"{shape}: pairs beyond it", found.counted, f"of {found.pairs}", "200"),
        Figure.at_least(f"{shape}: Kendall's tau over them", found.tau, "", "0.85", 0.9),
        Figure(f"{shape}: loss of promoting the top {TOP}", 100 * found.loss, "%", "0.2"),
    ]  # fmt: skip
