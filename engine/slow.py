"""The slow tier: a candidate with all its layers beside the incumbent, in turn."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from tideforge.engine import check, measure, timing
from tideforge.engine.nvml import device_bytes
from tideforge.engine.outcome import Figures, Outcome
from tideforge.engine.possible import floor_s
from tideforge.engine.service_config import new_core
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from tideforge.engine.evaluate import Bench
    from tideforge.engine.prepared import Prepared

WARM_REQUESTS = 4
CHECKED_ANSWERS = 3
COMPILED_STEP_S = 8.0  # a step's allowance when only kernels of other sizes than a dry run's can be left to compile


class SlowTier:
    """How a bench measures a prepared candidate. Raises CandidateError with what was observed, or IncumbentLost."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def evaluate(self, prepared: Prepared) -> Figures:
        bench, spent = self.bench, prepared.spent

        def attempt() -> timing.Timed:
            bench.revive_incumbent()  # its worker may rehearse, which waits for the clock: not while we hold it
            with bench.exclusive(spent):
                self._warm(prepared)
                spent.swap_s = spent.swap_s or time.perf_counter() - spent.begin
                with spent.on("clock_s"):
                    return self._time(prepared)

        timed = bench.outlive(prepared.staged, lambda: bench.incumbent_worker, attempt)
        with spent.on("check_s"):
            chosen = timed.to_check(CHECKED_ANSWERS)
            check.require_right(bench.reference, chosen, bench.layers, bench.bounds.logit_gap)
        self._require_possible(timed.fastest_step_s)
        found = measure.figures_of(measure.with_noise_floor(timed.ratio, bench.noise), timed.blocks)
        return dataclasses.replace(found, **bench.config.objective.told(timed.blocks))

    def _warm(self, prepared: Prepared) -> None:
        """Checked before it is timed, and its graphs captured; once, however often the incumbent dies."""
        if prepared.warm:
            return
        bench, worker = self.bench, prepared.staged
        worker.step_timeout_s = self._first_timeout_s(prepared)
        with prepared.spent.on("check_s"):
            self._check_eagerly(prepared)
        worker.step_timeout_s = bench.step_timeout_s
        prepared.spent.capture_s += bench.lab.capture(worker)
        self._replay_once(prepared)
        prepared.warm = True

    def _first_timeout_s(self, prepared: Prepared) -> float:
        """On a GPU the first steps may compile: all of a forward under the staging's allowance, the rest after a dry run."""
        usual = self.bench.step_timeout_s
        if self.bench.settings.device == "cpu":
            return usual
        return max(usual, COMPILED_STEP_S) if prepared.compiled else self.bench.staging.timeout_s

    def _check_eagerly(self, prepared: Prepared) -> None:
        """A few fresh requests before any clock runs: logits finite, every emitted token right. Warms the worker up too."""
        bench, arena = self.bench, prepared.staged.arena
        drawn, prompts = bench.replay()
        shapes = [dataclasses.replace(shape, output_tokens=3) for shape in drawn[:WARM_REQUESTS]]
        side = self._side(prepared)
        try:
            block = measure.run_block(side.core, side.forward, shapes, prompts[:WARM_REQUESTS], WARM_REQUESTS)
        except CandidateError as error:
            if error.outcome == Outcome.NOT_FINITE:
                check.require_written(arena.logits(1))
            raise
        check.require_finite(arena.logits(len(shapes)))
        check.require_right(bench.reference, block.answers, bench.layers, bench.bounds.logit_gap)

    def _replay_once(self, prepared: Prepared) -> None:
        """A graph's first replay takes longer: it is put on the device."""
        if self.bench.settings.capture_rows:
            side, (drawn, prompts) = self._side(prepared), self.bench.replay()
            measure.run_block(side.core, side.forward, measure.brief(drawn), prompts, self.bench.workload.users)

    def _side(self, prepared: Prepared) -> measure.Side:
        return measure.Side.of(prepared.forward.id, new_core(self.bench.settings), prepared.staged)

    def _time(self, prepared: Prepared) -> timing.Timed:
        bench = self.bench
        prepared.device_bytes.clear()
        deadline = time.monotonic() + bench.config.trial_s
        for timed in timing.passes(bench, prepared):
            self._note_memory(prepared)
            if timed.decided(bench.noise) or time.monotonic() > deadline:
                break
        return timed

    def _note_memory(self, prepared: Prepared) -> None:
        """What both workers hold on the GPU, where the driver tells."""
        if self.bench.settings.device == "cpu":
            return
        usual, own = device_bytes(self.bench.incumbent_worker.pid), device_bytes(prepared.staged.pid)
        if usual is not None and own is not None:
            prepared.device_bytes.append((usual, own))

    def floor_s(self) -> float:
        """Least seconds of one step."""
        config, lab = self.bench.config, self.bench.lab
        dtype = lab.settings.dtype
        return floor_s(lab.config, dtype, lab.weights_bytes, config.bandwidth_bytes_per_s, config.cache_bytes)

    def _require_possible(self, fastest_s: float) -> None:
        if fastest_s < (floor_s := self.floor_s()):
            raise CandidateError(
                "too_fast", f"a step of {1e3 * fastest_s:.3g} ms is under the floor, {1e3 * floor_s:.3g} ms"
            )
