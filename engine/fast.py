"""The fast tier: a candidate at two depths instead of at all layers. Their difference is the time of the layers between.

Embedding, head and sampling are in both, so they do not decide. Everything else is as on the slow tier: answers are checked
against the reference at the same depth, incumbent and candidate run in turn. Real tokens go through the embedding and all layers
from the first one on, the router among them, so every layer sees what it would see in the whole model: no activations are
recorded or drawn. A source that dawdles at the smaller depth looks better than it is, and what a source does for the head does
not show: this tier screens, the slow tier decides.

Depths alternate from replay to replay (smaller, larger, larger, smaller), and incumbent and candidate from step to step: a steady
drift then weighs on both depths and both sides alike.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import secrets
import time
from typing import TYPE_CHECKING

from tideforge.engine import check, measure
from tideforge.engine.archive import write_atomic
from tideforge.engine.depths import BLOCK_S, Reading, blocks_of, depths_of, enough, ratio_of, readings
from tideforge.engine.events import log_event
from tideforge.engine.objective import Objective
from tideforge.engine.outcome import Figures, Outcome
from tideforge.engine.prepared import Spent
from tideforge.errors import CandidateError, IncumbentLost

if TYPE_CHECKING:
    from tideforge.engine.evaluate import Bench
    from tideforge.engine.executor import RemoteExecutor
    from tideforge.engine.forward import Forward

MOST_S = 2.0  # of timing; a trial ends then, as precise as it is
MOST_STEPS = 1024  # decodes that are timed as one
WARM_REQUESTS = 2
CHECKED_ANSWERS = 2  # timed ones, at each depth
Blocks = tuple[measure.Block, measure.Block]


@dataclasses.dataclass
class Timed:
    """What the replays so far have shown."""

    steps: list[Reading] = dataclasses.field(default_factory=list)
    blocks: dict[int, list[Blocks]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))

    def answers(self, depth: int) -> list[measure.Answer]:
        """The candidate's."""
        return [answer for _, block in self.blocks[depth] for answer in block.answers]


class FastTier:
    """A bench's second way to measure. Its incumbent has a worker of its own, which never loads a candidate.

    Raises IncumbentLost when the incumbent does not run at these depths, CandidateError("refused") when there are none.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench, self.lab, self.depths = bench, bench.lab, depths_of(bench.lab.config)
        dtype = bench.lab.settings.dtype
        self.bounds = {depth: bench.reference.bounds(dtype, bench.corpus, range(depth)) for depth in self.depths}
        self.arena, self.decode_steps = self.lab.arena("fast-incumbent"), 1
        self.incumbent = self._start_incumbent()
        self.decode_steps = self._choose_decode_steps()
        self.noise: tuple[float, ...] = ()
        self.noise = self._measure_noise()
        facts = {"depths": list(self.depths), "decode_steps": self.decode_steps, "noise": list(self.noise)}
        log_event(bench.config.night, "fast_tier_ready", **facts)

    def stage(self, worker: RemoteExecutor, forward: Forward) -> None:
        """Both depths into a spare; needs no clock."""
        for depth in self.depths:
            self.lab.stage(worker, forward, range(depth), self.bench.stage_timeout_s())

    def measured(self, worker: RemoteExecutor, forward: Forward, spent: Spent) -> Figures:
        """Of a candidate that is staged. Raises CandidateError, or IncumbentLost."""
        timed = self._timed(worker, forward, spent)
        begin = time.perf_counter()
        for depth in self.depths:
            answers = timed.answers(depth)
            chosen = secrets.SystemRandom().sample(answers, min(CHECKED_ANSWERS, len(answers)))
            self._require_right(chosen, depth)
        spent.check_s += time.perf_counter() - begin
        return figures(timed, self.noise, self.depths[1])

    def _start_incumbent(self) -> RemoteExecutor:
        worker = self.lab.spare(self.arena)
        try:
            self.stage(worker, self.bench.incumbent)
            with self.lab.clock():
                self._warm(worker, self.bench.incumbent, Spent())
        except CandidateError as error:
            self.lab.release(worker)
            raise IncumbentLost(f"the incumbent does not run at {self.depths} layers: {error.message}") from error
        return worker

    def _choose_decode_steps(self) -> int:
        """So many decodes that one run of them at both depths fills a block; the reading's prefill makes them rather too few."""
        shapes, prompts = self.bench.replay()
        seconds = 0.0
        with self.lab.clock():
            for depth in self.depths:
                self.incumbent.select(depth)
                side = self._side(self.incumbent, self.bench.incumbent)
                seconds += measure.run_block(
                    side.core, side.forward, shapes, prompts, self.bench.workload.users
                ).seconds
        tokens = max(shape.output_tokens for shape in shapes)
        return max(1, min(MOST_STEPS, math.ceil(BLOCK_S * tokens / seconds)))

    def _measure_noise(self) -> tuple[float, ...]:
        """Log ratios of the incumbent's layers against themselves, each time in another fresh worker."""
        path = self.bench.config.night / f"fast-noise{self.bench.config.lane}.json"
        logs = [self._against_itself() for _ in range(self.bench.config.noise_trials)]
        write_atomic(path, json.dumps({"log_ratios": logs, "depths": self.depths}))
        return tuple(logs)

    def _against_itself(self) -> float:
        worker = self.lab.spare(self.lab.arena("fast-noise"))
        try:
            self.stage(worker, self.bench.incumbent)
            return math.log(self.measured(worker, self.bench.incumbent, Spent()).ratio)
        except CandidateError as error:
            raise IncumbentLost(f"the incumbent cannot be measured beside itself: {error.message}") from error
        finally:
            self.lab.release(worker)

    def _side(self, worker: RemoteExecutor, forward: Forward) -> measure.Side:
        core = self.bench.new_core()
        core.scheduler.limits = dataclasses.replace(self.bench.settings.limits, decode_steps=self.decode_steps)
        return measure.Side.of(forward.id, core, worker)

    def _require_right(self, answers: list[measure.Answer], depth: int) -> None:
        check.require_right(self.bench.reference, answers, range(depth), self.bounds[depth].logit_gap)

    def _warm(self, worker: RemoteExecutor, forward: Forward, spent: Spent) -> None:
        """A few answers at each depth, checked before anything is timed, then the graphs. The caller holds the clock."""
        on_gpu = self.bench.settings.device != "cpu"
        worker.step_timeout_s = self.bench.stage_timeout_s() if on_gpu else self.bench.step_timeout_s  # kernels compile
        begin, spent.capture_s = time.perf_counter(), 0.0
        for depth in self.depths:
            worker.select(depth)
            self._check_eagerly(worker, forward, depth)
            spent.capture_s += self.lab.capture(worker)
            self._replay_once(worker, forward)
        spent.check_s = time.perf_counter() - begin - spent.capture_s
        worker.step_timeout_s = self.bench.step_timeout_s

    def _replay_once(self, worker: RemoteExecutor, forward: Forward) -> None:
        """A graph's first replay takes longer: it is put on the device."""
        if self.bench.settings.capture_rows:
            side, (drawn, prompts) = self._side(worker, forward), self.bench.replay()
            measure.run_block(side.core, side.forward, measure.brief(drawn), prompts, self.bench.workload.users)

    def _check_eagerly(self, worker: RemoteExecutor, forward: Forward, depth: int) -> None:
        drawn, prompts = self.bench.replay()
        shapes = [dataclasses.replace(shape, output_tokens=3) for shape in drawn[:WARM_REQUESTS]]
        side = self._side(worker, forward)
        try:
            block = measure.run_block(side.core, side.forward, shapes, prompts[: len(shapes)], len(shapes))
        except CandidateError as error:
            if error.outcome == Outcome.NOT_FINITE:
                check.require_written(worker.arena.logits(1))
            raise
        check.require_finite(worker.arena.logits(len(shapes)))
        self._require_right(list(block.answers), depth)

    def _timed(self, worker: RemoteExecutor, forward: Forward, spent: Spent) -> Timed:
        warm = False

        def attempt() -> Timed:
            nonlocal warm
            if not self.incumbent.alive:  # its start takes the clock for itself
                self.lab.release(self.incumbent)
                self.incumbent = self._start_incumbent()
            with self.bench.exclusive(spent):
                if not warm:
                    self._warm(worker, forward, spent)
                    warm = True
                    spent.swap_s = time.perf_counter() - spent.begin
                begin = time.perf_counter()
                timed = self._time(worker, forward)
                spent.clock_s = time.perf_counter() - begin
                return timed

        return self.bench.outlive(worker, lambda: self.incumbent, attempt)

    def _time(self, worker: RemoteExecutor, forward: Forward) -> Timed:
        timed, deadline = Timed(), time.monotonic() + min(MOST_S, self.bench.config.trial_s)
        while True:
            for order in (self.depths, self.depths[::-1]):
                self._replay(worker, forward, order, timed)
            if enough(blocks_of(timed.steps)) or time.monotonic() > deadline:
                return timed

    def _replay(self, worker: RemoteExecutor, forward: Forward, order: tuple[int, ...], timed: Timed) -> None:
        """The same fresh requests at both depths, one depth after the other, step by step on both sides."""
        shapes, prompts = self.bench.replay()
        pairs = {}
        for depth in order:
            for one in (self.incumbent, worker):
                one.select(depth)
            sides = self._side(self.incumbent, self.bench.incumbent), self._side(worker, forward)
            a, b, pairs[depth] = measure.lockstep(*sides, shapes, prompts)
            timed.blocks[depth].append((a, b))
        timed.steps += readings(*(pairs[depth] for depth in self.depths))


def figures(timed: Timed, noise: tuple[float, ...], larger: int) -> Figures:
    """The ratio is of the layers between the depths; tokens/s and latencies are of the larger depth."""
    found = measure.with_noise_floor(ratio_of(blocks_of(timed.steps)), noise)
    return dataclasses.replace(measure.figures_of(found, timed.blocks[larger]), **Objective().words())
