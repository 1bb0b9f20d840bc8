"""The fast tier: a candidate at two depths instead of at all layers. Their difference is the time of the layers between.

Embedding, head and sampling are in both, so they do not decide. Everything else is as on the slow tier: real tokens through all
the layers that there are, answers checked against the reference at the same depth, incumbent and candidate in turn. A source
that dawdles at the smaller depth looks better than it is: this tier screens, the slow tier decides.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import TYPE_CHECKING

from tideforge.engine import check, measure
from tideforge.engine.events import log_event
from tideforge.engine.outcome import Figures
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from tideforge.engine.config import ModelConfig
    from tideforge.engine.evaluate import Bench
    from tideforge.engine.executor import RemoteExecutor
    from tideforge.engine.forward import Forward
    from tideforge.engine.prepared import Spent

PASSES = 3
Pairs = list[tuple[float, float]]


def depths_of(config: ModelConfig) -> tuple[int, int]:
    """(smaller, larger) numbers of layers: whole periods of the pattern of dense and sparse layers, after what leads it in.

    Raises CandidateError("refused") when the model is too short for two depths.
    """
    kinds = [config.is_sparse(index) for index in range(config.num_hidden_layers)]
    for lead in range(len(kinds)):
        rest = kinds[lead:]
        period = next(p for p in range(1, len(rest) + 1) if rest[p:] == rest[:-p])
        if (periods := len(rest) // period) >= 2:
            return lead + period, lead + period * min(3, periods)
    raise CandidateError("refused", f"{len(kinds)} layers are too few for two depths; submit to the slow tier")


class FastTier:
    """A bench's second way to measure. Its incumbent has a worker of its own, which never loads a candidate."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.depths = bench, depths_of(bench.lab.config)
        dtype = bench.lab.settings.dtype
        self.bounds = {depth: bench.reference.bounds(dtype, bench.corpus, range(depth)) for depth in self.depths}
        self.arena = bench.lab.arena("fast-incumbent")
        self.incumbent = self._start_incumbent()
        log_event(bench.config.night, "fast_tier_ready", depths=list(self.depths))

    def _start_incumbent(self) -> RemoteExecutor:
        worker = self.bench.lab.spare(self.arena)
        self.stage(worker, self.bench.incumbent)
        self._warm(worker, self.bench.incumbent)
        return worker

    def stage(self, worker: RemoteExecutor, forward: Forward) -> None:
        for depth in self.depths:
            self.bench.lab.stage(worker, forward, range(depth), self.bench.stage_timeout_s())

    def _side(self, worker: RemoteExecutor, forward: Forward) -> measure.Side:
        return measure.Side.of(forward.id, self.bench.new_core(), worker)

    def _warm(self, worker: RemoteExecutor, forward: Forward) -> None:
        """A few answers at each depth, checked before any clock runs; on a GPU the graphs come after the first ones."""
        for depth in self.depths:
            worker.select(depth)
            shapes, prompts = self.bench.replay()
            short = [dataclasses.replace(shape, output_tokens=3) for shape in shapes]
            side = self._side(worker, forward)
            block = measure.run_block(side.core, forward.id, short, prompts, self.bench.workload.users)
            check.require_right(self.bench.reference, block.answers[:3], range(depth), self.bounds[depth].logit_gap)
            self.bench.lab.capture(worker)

    def measured(self, worker: RemoteExecutor, forward: Forward, spent: Spent) -> Figures:
        """Checks and times a candidate that is staged in `worker` at both depths. Raises CandidateError with what was observed."""
        worker.step_timeout_s = self.bench.step_timeout_s
        if not self.incumbent.alive:
            self.bench.lab.release(self.incumbent)
            self.incumbent = self._start_incumbent()
        begin = time.perf_counter()
        self._warm(worker, forward)
        spent.check_s = time.perf_counter() - begin
        begin = time.perf_counter()
        with self.bench.exclusive(spent):
            spent.swap_s = time.perf_counter() - spent.begin
            passes = [self._pass(worker, forward) for _ in range(PASSES)]
        spent.clock_s = time.perf_counter() - begin
        return figures([pair for pairs, _ in passes for pair in pairs], [deep for _, deep in passes])

    def _pass(self, worker: RemoteExecutor, forward: Forward) -> tuple[Pairs, tuple[measure.Block, measure.Block]]:
        """The same requests at both depths: seconds of the layers between, step by step, and the deeper blocks."""
        shapes, prompts = self.bench.replay()
        steps: list[Pairs] = []
        for depth in self.depths:
            for one in (self.incumbent, worker):
                one.select(depth)
            sides = self._side(self.incumbent, self.bench.incumbent), self._side(worker, forward)
            a, b, pairs = measure.lockstep(*sides, shapes, prompts)
            answer = secrets.choice(b.answers)
            check.require_right(self.bench.reference, [answer], range(depth), self.bounds[depth].logit_gap)
            steps.append(pairs)
        between = [(d[0] - s[0], d[1] - s[1]) for s, d in zip(*steps, strict=True)]
        return between, (a, b)


def figures(between: Pairs, deep: list[tuple[measure.Block, measure.Block]]) -> Figures:
    """The ratio is of the layers between the depths; tokens/s and latencies are of the larger depth."""
    totals = [sum(column) for column in zip(*between, strict=True)]
    if min(totals) <= 0:
        raise CandidateError(
            "too_fast", f"the larger depth took {1e3 * min(totals):.3g} ms longer than the smaller one"
        )
    return measure.figures_of(measure.ratio_of_steps(between), deep)
