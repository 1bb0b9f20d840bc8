"""One trial, start to end: screen, stage in a spare, check against the reference, time beside the incumbent, check again.

`prepare` does what needs no clock, in any thread, beside the trial that is measured; `measure` the rest, one trial at a time.
Every failure is a CandidateError with the outcome that was observed; it ends the trial and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import check, conduct, measure, tuning
from tideforge.engine.core import EngineCore
from tideforge.engine.events import log_event
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.fast import FastTier
from tideforge.engine.forward import KNOBS, Forward
from tideforge.engine.lab import Lab
from tideforge.engine.ladder import Ladder, climb
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.engine.outlive import outlive
from tideforge.engine.prepared import Prepared, Spent
from tideforge.engine.reference import Reference
from tideforge.engine.service_config import ServiceConfig, for_bench, in_runs, new_core
from tideforge.engine.slow import SlowTier
from tideforge.engine.staging import FAST, Staging
from tideforge.errors import CandidateError, IncumbentLost

CHECKED_ANSWERS = 3
STEP_TIMEOUT_FACTOR = 20.0
MIN_STEP_TIMEOUT_S = 2.0
UNDRIED = (Outcome.WRONG, Outcome.NOT_FINITE, Outcome.FORWARD_ERROR)  # what comes of results that were never computed

T = TypeVar("T")


class Bench:
    """The incumbent's worker, the reference, and spares that stand by: what one device measures candidates with."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.workload = Workload.read(config.workload)
        self.lab = Lab(for_bench(config.settings, self.workload, config.objective), config.night)
        self.layers = range(self.lab.config.num_hidden_layers)
        self.corpus = self.workload.corpus[: len(self.workload.corpus) // 2]
        self.reference = Reference.start(config.settings.model, config.settings.state, device=config.settings.device)
        self.bounds = self.reference.bounds(config.settings.dtype, self.corpus)
        self.arena = self.lab.arena("search-incumbent")
        self.step_timeout_s = 60.0
        self.decode_s = 0.0  # of one step of the incumbent's
        self.incumbent, self.settings = Forward.load(config.incumbent), self.lab.settings
        self.incumbent_worker = self._start_incumbent()
        self._tune()
        self.ahead = self.settings.ahead
        self.staging = Staging(self.lab, config, self.incumbent.knobs)
        self.staging.stock()
        self._slow = SlowTier(self)
        self.ladder = Ladder()
        self._fast: FastTier | None = None
        self.noise: tuple[float, ...] = ()
        self.noise = tuning.noise(self)

    def close(self) -> None:
        self.reference.close()
        self.lab.close()

    def _start_incumbent(self) -> RemoteExecutor:
        """A worker that never loads a candidate; its longest step sets the deadline of a candidate's."""
        worker = self.lab.spawn(self.incumbent, self.arena)
        side = measure.Side.of(self.incumbent.id, new_core(self.settings), worker)
        begin = time.perf_counter()
        if self.settings.capture_rows:
            measure.run_block(side.core, side.forward, *self.replay(), self.workload.users)  # kernels are compiled now
            self.lab.trust(self.incumbent)
            self.lab.capture(worker)
            self.lab.keep_kernels(self.incumbent)
        block = measure.run_block(side.core, side.forward, *self.replay(), self.workload.users)
        check.require_right(self.reference, block.answers[:CHECKED_ANSWERS], self.layers, self.bounds.logit_gap)
        longest = max(
            b - a for answer in block.answers for a, b in zip((0.0, *answer.times_s), answer.times_s, strict=False)
        )
        self.step_timeout_s = max(MIN_STEP_TIMEOUT_S, STEP_TIMEOUT_FACTOR * longest)
        self.decode_s = 1 / measure.user_tps([block])[0]
        worker.step_timeout_s = max(60.0, self.step_timeout_s)
        log_event(self.config.night, "incumbent_ready", forward=self.incumbent.id, seconds=time.perf_counter() - begin)
        return worker

    def replay(self) -> tuple[list[RequestShape], list[tuple[int, ...]]]:
        """Fresh requests of the search part, revealed now."""
        return measure.draw_replay(self.workload.search, self.workload.users, self.corpus, secrets.randbits(64))

    def _tune(self) -> None:
        """Finds the incumbent's best knobs, once a night, and freezes them for every candidate."""
        served = self.incumbent.id
        with tuning.one_bench_tunes(self.config.night):
            knobs = tuning.tuned_knobs(self)
            self.incumbent = self.incumbent.with_file(KNOBS, json.dumps(knobs, sort_keys=True) + "\n")
            self.incumbent.save(self.lab.settings.state / "forwards")
            tuning.write_tuned(self, served)
        self.settings = in_runs(self.lab.settings.with_knobs(knobs), self.decode_s)

    def against_itself(self) -> float:
        """The ratio of the incumbent against itself in a fresh worker."""
        one = Prepared(Trial("noise", self.incumbent.id, "slow", "", time.time()), self.incumbent)
        try:
            self.staging.stage(one)
            return self._slow.evaluate(one).ratio
        finally:
            self.staging.release(one)

    def evaluate(self, trial: Trial, forward: Forward) -> Trial:
        """The trial with its outcome, and figures if it passed. Never raises for what a candidate did."""
        return self.measure(self.prepare(trial, forward))

    def prepare(self, trial: Trial, forward: Forward) -> Prepared:
        """All that needs no clock: import and build happen in a spare of its own. Any thread, several at once.

        Never raises for what a candidate did: it is done then.
        """
        prepared = Prepared(trial, forward, Spent(queue_s=max(0.0, time.time() - trial.submitted_at)))
        try:
            self.staging.stage(prepared)
            prepared.spent.prepared = time.perf_counter()
        except CandidateError as error:
            prepared.done = self._end(prepared, Outcome(error.outcome), error.message)
        return prepared

    def measure(self, prepared: Prepared) -> Trial:
        """The trial with its outcome; one at a time. Never raises for what a candidate did.

        Without an outcome it has to be begun again, alone: somebody wrote the weights, and more than one could have.
        """
        if prepared.done is not None:
            return prepared.done
        try:
            figures = self._figures(prepared)
            self._require_good_conduct(prepared)
            if self.ladder.due(prepared.trial.tier, figures):
                with prepared.spent.on("gates_s"):
                    climb(self, prepared)
        except CandidateError as error:
            return self._end(prepared, Outcome(error.outcome), error.message)
        except IncumbentLost as lost:
            return self._end(prepared, Outcome.NOT_MEASURED, str(lost))
        return self._end(prepared, Outcome.PASSED, figures=figures)

    def _figures(self, prepared: Prepared) -> Figures:
        """Of its tier. What a dry run is asked to compute never is: a forward that keeps results of its first call, as packed weights,
        fails so, and is tried once more in a worker that ran nothing dry."""
        tier = self._fastly if prepared.trial.tier == FAST else self._slow.evaluate
        try:
            return tier(prepared)
        except CandidateError as error:
            if not prepared.compiled or prepared.warm or error.outcome not in UNDRIED:
                raise
        self.staging.afresh(prepared)
        return tier(prepared)

    def discard(self, prepared: Prepared) -> None:
        """Ends a prepared candidate that nobody wants to have measured."""
        if prepared.done is None:
            self._end(prepared, Outcome.CANCELLED, "discarded")

    def new_core(self) -> EngineCore:
        return new_core(self.settings)

    def stage_timeout_s(self) -> float:
        return self.staging.timeout_s

    def _end(self, prepared: Prepared, outcome: Outcome, message: str = "", figures: Figures | None = None) -> Trial:
        """Takes the worker away, if there was one, and looks at what it leaves."""
        if not self.staging.release(prepared):
            outcome, figures = Outcome.WEIGHTS_WRITTEN, None
            message = "the weights' checksum is another than before it; they are restored"
        if prepared.suspect:
            return prepared.trial
        done = dataclasses.replace(
            prepared.trial, outcome=outcome, message=message, figures=figures, finished_at=time.time(),
            environment={**environment(), "device": self.settings.device, "sandbox": str(self.lab.sandbox)}, **prepared.spent.parts,
        )  # fmt: skip
        self.ladder.note(done)
        return done

    @contextlib.contextmanager
    def exclusive(self, spent: Spent) -> Iterator[None]:
        """The device is this trial's alone. What it waited for that since it was prepared is noted the first time."""
        self.staging.settle()
        with self.lab.clock():
            spent.lock_s = spent.lock_s or time.perf_counter() - spent.prepared
            yield

    def _fastly(self, prepared: Prepared) -> Figures:
        return self._fast_tier().measured(prepared.staged, prepared.forward, prepared.spent)

    def _fast_tier(self) -> FastTier:
        """Started by the first trial that asks for it."""
        if self._fast is None:
            try:
                self._fast = FastTier(self)
            except CandidateError as error:
                raise IncumbentLost(f"the fast tier's incumbent did not start: {error.message}") from error
        return self._fast

    def revive_incumbent(self) -> None:
        if not self.incumbent_worker.alive:
            self.lab.release(self.incumbent_worker)
            self.incumbent_worker = self._start_incumbent()
            with contextlib.suppress(CandidateError):  # it died again: whoever needs it sees that
                self.noise = tuning.noise(self)

    def outlive(self, worker: RemoteExecutor, incumbent: Callable[[], RemoteExecutor], attempt: Callable[[], T]) -> T:
        """Again from the start each time the incumbent's worker died meanwhile: the candidate is not to blame for that."""
        return outlive(self.config.night, worker, incumbent, attempt)

    def _require_good_conduct(self, prepared: Prepared) -> None:
        worker, settings = prepared.staged, self.settings
        assert prepared.before is not None
        conduct.require_decent(prepared.before, worker.ward.census(), settings.threads)
        ours = list(worker.resident)
        conduct.require_steady_device(prepared.device_bytes)
        conduct.require_steady(ours, list(self.incumbent_worker.resident)[-len(ours) :])


def environment() -> dict[str, Any]:
    """What a figure depends on besides source: machine, kernel, Python, load."""
    from importlib.metadata import version

    with open("/proc/loadavg") as file:
        load = file.read().split()[0]
    return {
        "machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version(),
        "torch": version("torch"), "load_1min": float(load),
    }  # fmt: skip
