"""Gates of how a forward is run: beside others or alone, again, in other batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tideforge.engine.executor import Sampled
from tideforge.engine.gates.caught import Caught, require_alike, require_right
from tideforge.engine.gates.probe import Probe, Recorder, drain
from tideforge.engine.gates.replay import Watch
from tideforge.engine.scheduler import Step

SIZES = 6  # batch sizes that are drawn beside those that must be


def interleaved_against_serial(probe: Probe) -> dict[str, Any]:
    """Requests answered side by side equal those answered one by one: neighbours in the batch do not matter."""
    count = min(6, probe.limits.max_num_seqs)
    prompts = dict(zip(map(str, range(count)), probe.spans([7 + 5 * i for i in range(count)]), strict=True))
    together, alone = Recorder(probe.worker, probe.arena), Recorder(probe.worker, probe.arena)
    chains = {}
    for recorder, at_once in ((together, count), (alone, 1)):
        requests = [probe.request(name, prompt, 6) for name, prompt in prompts.items()]
        chains[at_once] = drain(probe.core(recorder), requests, at_once)
        gap = require_right(probe, chains[at_once], prompts)
    bound = 2 * probe.bounds.logit  # both runs may be off, in opposite directions
    worst = require_alike([together.rows, alone.rows], [chains[count], chains[1]], bound, "beside neighbours")
    return {"max_logit_difference": worst, "worst_gap": gap, "bound": bound}


def determinism(probe: Probe) -> dict[str, Any]:
    """The same requests in the same batch twice: the same tokens and bit-identical logits."""
    prompts = dict(zip("ab", probe.spans([11, 23]), strict=True))
    runs = []
    for _ in range(2):
        recorder = Recorder(probe.worker, probe.arena)
        drain(probe.core(recorder), [probe.request(name, prompt, 5) for name, prompt in prompts.items()], 2)
        runs.append(recorder.rows)
    for name in prompts:
        for step, (a, b) in enumerate(zip(runs[0][name], runs[1][name], strict=True)):
            if not np.array_equal(a.logits, b.logits):
                difference = float(np.abs(a.logits - b.logits).max())
                raise Caught(f"request {name}, token {step}: two runs differ by {difference:.4g} logits")
    return {"tokens": sum(len(rows) for rows in runs[0].values())}


def batch_sizes(probe: Probe) -> dict[str, Any]:
    """Batches of the sizes that the worker captured, of those beside them and of others between, on the way up and down.

    On the way up each step has decodes and a prefill. Every answer must be right, and the logits of the request that is in all
    batches within the bound.
    """
    rng = np.random.default_rng(probe.secret())
    sizes = _sizes(probe, rng)
    recorder = Recorder(probe.worker, probe.arena)
    watch = _Sizes(recorder)
    core = probe.core(watch)
    prompts = {str(i): prompt for i, prompt in enumerate(probe.spans(rng.integers(2, 9, sizes[-1]).tolist()))}
    # Request i is the i-th to come and the i-th last to go: one leaves after each size that is not asked for.
    lasting = {str(i): sum(size > i for size in sizes) for i in range(sizes[-1])}
    chains: dict[str, list[int]] = {name: [] for name in prompts}
    waiting, step = list(prompts), 0
    while waiting or core.has_work():
        joining = waiting[: sizes[step] - (sizes[step - 1] if step else 0)] if step < len(sizes) else []
        waiting, up = waiting[len(joining) :], len(sizes) - step
        for name in joining:
            core.add(probe.request(name, prompts[name], up + lasting[name]))
        step += 1
        for event in core.step():
            chains[event.request_id].append(event.token)
    missed = set(sizes) - watch.seen
    if missed:
        raise Caught(f"batches of {sorted(missed)} rows never ran")
    gap = require_right(probe, chains, prompts)
    worst = _within(probe, recorder, prompts, chains)
    return {"sizes": sizes, "worst_gap": gap, "max_logit_difference": worst, "bound": probe.bounds.logit}


def _sizes(probe: Probe, rng: np.random.Generator) -> list[int]:
    """Ascending, from 1 to the largest batch."""
    most = probe.limits.max_num_seqs
    beside = {size + by for size in (most, *probe.captured) for by in (-1, 0, 1)}
    anywhere = rng.integers(1, most + 1, SIZES).tolist()
    return sorted({1, *(size for size in beside if 1 <= size <= most), *anywhere})


def _within(
    probe: Probe, recorder: Recorder, prompts: dict[str, tuple[int, ...]], chains: dict[str, list[int]]
) -> float:
    """Of the request that was in all batches."""
    tokens = (*prompts["0"], *chains["0"])
    expected = probe.reference.logits(tokens, range(len(prompts["0"]) - 1, len(tokens) - 1), probe.layers)
    off = np.abs(np.stack([row.logits for row in recorder.rows["0"]]) - expected).max(axis=1)
    at = int(np.nan_to_num(off, nan=np.inf).argmax())
    if not off[at] <= probe.bounds.logit:
        raise Caught(f"request 0, token {at}: logits are off by {off[at]:.4g}; bound {probe.bounds.logit:.4g}")
    return float(off[at])


class _Sizes:
    """Passes steps on, and keeps how many rows decoded at once."""

    def __init__(self, inner: Recorder) -> None:
        self.inner, self.seen = inner, set[int]()

    def execute(self, step: Step) -> list[Sampled]:
        self.seen.add(len(step.request_ids))
        return self.inner.execute(step)

    def halt(self) -> None:
        self.inner.halt()


def back_to_back(probe: Probe) -> dict[str, Any]:
    """Decodes run one after another without the host equal single ones: tokens, and the logits that each run of them ends with."""
    rng = np.random.default_rng(probe.secret())
    count, length = min(5, probe.limits.max_num_seqs), int(rng.integers(5, 12))
    prompts = {str(i): prompt for i, prompt in enumerate(probe.spans(rng.integers(3, 20, count).tolist()))}
    alone, last = Recorder(probe.worker, probe.arena), _Last(probe)
    chains = []
    for executor, runs in ((alone, 1), (last, max(int(rng.integers(2, length)), probe.limits.decode_steps))):
        core = probe.core(executor, decode_steps=runs)
        chains.append(drain(core, [probe.request(name, prompt, length) for name, prompt in prompts.items()], count))
    gap, bound = require_right(probe, chains[1], prompts), 2 * probe.bounds.logit
    worst = 0.0
    for (name, at), logits in last.logits.items():
        if chains[0][name][:at] == chains[1][name][:at]:
            difference = float(np.abs(alone.rows[name][at].logits - logits).max())
            worst = max(worst, difference)
            if not difference <= bound:
                raise Caught(
                    f"request {name}, token {at}: logits differ by {difference:.4g} after {last.longest} decodes without the "
                    f"host; bound {bound:.4g}"
                )
    return {"longest_run": last.longest, "max_logit_difference": worst, "worst_gap": gap, "bound": bound}


class _Last:
    """Passes steps on, and keeps the logits that each one ends with, by request and by how many tokens came before."""

    def __init__(self, probe: Probe) -> None:
        self.logits: dict[tuple[str, int], np.ndarray] = {}
        self.longest = 0
        self.count: dict[str, int] = {}
        self.watch = Watch(probe.worker, after=self.after)
        self.execute, self.halt, self.arena = self.watch.execute, self.watch.halt, probe.arena

    def after(self, step: Step, runs: list[Sequence[int]]) -> None:
        self.longest = max(self.longest, len(runs))
        logits = self.arena.logits(len(step.request_ids))
        for row, name in enumerate(step.request_ids):
            self.count[name] = self.count.get(name, 0) + len(runs)
            self.logits[name, self.count[name] - 1] = logits[row].copy()
