"""One trial, start to end: screen, stage in a spare, check against the reference, time beside the incumbent, check again.

Every failure is a CandidateError with the outcome that was observed; it ends the trial and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import secrets
import statistics
import time
from typing import Any

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import check, conduct, measure
from tideforge.engine.archive import write_atomic
from tideforge.engine.core import EngineCore
from tideforge.engine.events import log_event
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.fast import FastTier
from tideforge.engine.forward import KNOBS, Forward
from tideforge.engine.lab import Lab
from tideforge.engine.memory import ITEM_BYTES, Arena
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.engine.reference import Reference
from tideforge.engine.screen import screen
from tideforge.engine.service_config import ServiceConfig, for_bench, new_core
from tideforge.engine.spares import Spares
from tideforge.engine.ward import Census
from tideforge.errors import CandidateError, IncumbentLost

FAST = "fast"
TIERS = ("slow", FAST)
WARM_REQUESTS = 4
CHECKED_ANSWERS = 3
MAX_STAGE_S = 30.0
HOPELESS = 0.97  # below this ratio after a pass, no further pass is spent
MIN_PAIRS = 8  # of steps, before an interval decides anything: the spread of a few is luck
PRECISE = 0.01  # half-width of the ratio's interval at which a trial ends
STEP_TIMEOUT_FACTOR = 20.0
MIN_STEP_TIMEOUT_S = 2.0
INCUMBENT_RETRIES = 3  # of one trial, when the incumbent's worker dies under it


@dataclasses.dataclass
class Spent:
    """Seconds of each part of a trial, kept also when it fails in mid-way."""

    begin: float = 0.0
    stage_s: float = 0.0
    check_s: float = 0.0
    capture_s: float = 0.0
    swap_s: float = 0.0
    clock_s: float = 0.0


class Bench:
    """The incumbent's worker, the reference, and a spare that stands by; `evaluate` is the only thing it does."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.workload = Workload.read(config.workload)
        self.lab = Lab(for_bench(config.settings, self.workload), config.night)
        self.layers = range(self.lab.config.num_hidden_layers)
        self.corpus = self.workload.corpus[: len(self.workload.corpus) // 2]
        self.reference = Reference.start(config.settings.model, config.settings.state, device=config.settings.device)
        self.bounds = self.reference.bounds(config.settings.dtype, self.corpus)
        self.arena = self.lab.arena("search-incumbent")
        self.step_timeout_s = 60.0
        self.incumbent, self.settings = Forward.load(config.incumbent), self.lab.settings
        self.incumbent_worker = self._start_incumbent()
        self._tune()
        self.spares = Spares(self.lab, 1, config.night)
        self.spares.refill()
        self._fast: FastTier | None = None
        self.noise: tuple[float, ...] = ()
        self.noise = self._measure_noise()

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
        block = measure.run_block(side.core, side.forward, *self.replay(), self.workload.users)
        check.require_right(self.reference, block.answers[:CHECKED_ANSWERS], self.layers, self.bounds.logit_gap)
        longest = max(
            b - a for answer in block.answers for a, b in zip((0.0, *answer.times_s), answer.times_s, strict=False)
        )
        self.step_timeout_s = max(MIN_STEP_TIMEOUT_S, STEP_TIMEOUT_FACTOR * longest)
        worker.step_timeout_s = max(60.0, self.step_timeout_s)
        log_event(self.config.night, "incumbent_ready", forward=self.incumbent.id, seconds=time.perf_counter() - begin)
        return worker

    def replay(self) -> tuple[list[RequestShape], list[tuple[int, ...]]]:
        """Fresh requests of the search part, revealed now."""
        return measure.draw_replay(self.workload.search, self.workload.users, self.corpus, secrets.randbits(64))

    def _tune(self) -> None:
        """Finds the incumbent's best knobs by a plain search, once a night, and freezes them for every candidate."""
        path = self.config.night / "tuned.json"
        knobs = self.incumbent.knobs
        if path.exists():
            knobs = json.loads(path.read_text())["knobs"]
        elif self.config.tune:
            knobs = self._best_knobs()
        served = self.incumbent.id
        self.incumbent = self.incumbent.with_file(KNOBS, json.dumps(knobs, sort_keys=True) + "\n")
        self.incumbent.save(self.lab.settings.state / "forwards")
        write_atomic(
            path,
            json.dumps(
                {
                    "knobs": knobs,
                    "incumbent": self.incumbent.id,
                    "served": served,
                    "bounds": dataclasses.asdict(self.bounds),
                }
            ),
        )
        self.settings = self.lab.settings.with_knobs(knobs)

    def _best_knobs(self) -> dict[str, Any]:
        """max_num_batched_tokens by interleaved replays on the incumbent's own worker: two rounds, best median."""
        own = self.incumbent.knobs
        largest = self.lab.settings.limits.max_num_batched_tokens
        options = [own] + [
            {**own, "max_num_batched_tokens": n} for n in (largest // 4,) if n >= self.lab.settings.limits.max_num_seqs
        ]
        seconds: dict[int, list[float]] = {index: [] for index in range(len(options))}
        with self.lab.clock():
            for _ in range(2):
                shapes, prompts = self.replay()
                for index, knobs in enumerate(options):
                    side = measure.Side.of(
                        self.incumbent.id, new_core(self.lab.settings.with_knobs(knobs)), self.incumbent_worker
                    )
                    block = measure.run_block(side.core, side.forward, shapes, prompts, self.workload.users)
                    seconds[index].append(block.seconds)
        best = min(seconds, key=lambda index: statistics.median(seconds[index]))
        log_event(self.config.night, "tuned", options=options, seconds=list(seconds.values()), best=options[best])
        return options[best]

    def _measure_noise(self) -> tuple[float, ...]:
        """Log ratios of the incumbent against itself, each time in another fresh worker. Once a night."""
        path = self.config.night / "noise.json"
        if not path.exists():
            logs = []
            for _ in range(self.config.noise_trials):
                worker = self.spares.take()
                try:
                    self.lab.stage(worker, self.incumbent, self.layers)
                    logs.append(math.log(self._measure(worker, self.incumbent, Spent()).ratio))
                finally:
                    self.spares.release(worker)
                    self.spares.refill()
            write_atomic(path, json.dumps({"log_ratios": logs}))
        return tuple(json.loads(path.read_text())["log_ratios"])

    def evaluate(self, trial: Trial, forward: Forward) -> Trial:
        """The trial with its outcome, and figures if it passed. Never raises for what a candidate did."""
        spent = Spent()
        worker: RemoteExecutor | None = None
        try:
            if trial.tier not in TIERS:
                raise CandidateError("refused", f"there is no tier {trial.tier!r}; take one of {', '.join(TIERS)}")
            screen(forward, self.config.allow_imports)
            self._require_frozen_knobs(forward)
            spent.begin = time.perf_counter()
            worker = self.spares.take()
            log_event(self.config.night, "trial_worker", trial=trial.id, worker=worker.pid)
            self.spares.refill()  # beside the staging, so that the next trial need not wait for it
            before = worker.ward.census()
            if trial.tier == FAST:
                figures = self._fast_tier().evaluate(worker, forward, spent)
            else:
                begin = time.perf_counter()
                self.lab.stage(worker, forward, self.layers, self.stage_timeout_s())
                spent.stage_s = time.perf_counter() - begin
                figures = self._measure(worker, forward, spent)
            self._require_good_conduct(worker, before)
            done = dataclasses.replace(trial, outcome=Outcome.PASSED, figures=figures)
        except CandidateError as error:
            done = dataclasses.replace(trial, outcome=Outcome(error.outcome), message=error.message)
        except IncumbentLost as lost:
            done = dataclasses.replace(trial, outcome=Outcome.NOT_MEASURED, message=str(lost))
        finally:
            if worker is not None:
                self.spares.release(worker)
            self.spares.refill()
        if worker is not None and not self.lab.weights_intact():
            message = "the weights' checksum is another than before it; they are restored"
            done = dataclasses.replace(trial, outcome=Outcome.WEIGHTS_WRITTEN, message=message)
        if done.outcome is not Outcome.PASSED:
            self.lab.forget_kernels(forward)
        return dataclasses.replace(
            done, stage_s=spent.stage_s, check_s=spent.check_s, capture_s=spent.capture_s, swap_s=spent.swap_s,
            clock_s=spent.clock_s,            finished_at=time.time(), environment=environment(),
        )  # fmt: skip

    def _fast_tier(self) -> FastTier:
        """Started by the first trial that asks for it."""
        if self._fast is None:
            self._fast = FastTier(self)
        return self._fast

    def new_core(self) -> EngineCore:
        return new_core(self.settings)

    def stage_timeout_s(self) -> float:
        """Imports and builds may compile, so they get more time than a step."""
        return min(MAX_STAGE_S, self.config.trial_s)

    def _require_frozen_knobs(self, forward: Forward) -> None:
        if forward.knobs != self.incumbent.knobs:
            raise CandidateError(
                "refused", f"knobs are frozen at the incumbent's best, {json.dumps(self.incumbent.knobs)}"
            )

    def _measure(self, worker: RemoteExecutor, forward: Forward, spent: Spent) -> Figures:
        # On a GPU the first steps compile: they share the allowance of the staging.
        worker.step_timeout_s = self.step_timeout_s if self.settings.device == "cpu" else self.stage_timeout_s()
        candidate = measure.Side.of(forward.id, new_core(self.settings), worker)
        begin = time.perf_counter()
        self._check_eagerly(candidate, worker.arena)
        spent.check_s = time.perf_counter() - begin
        worker.step_timeout_s = self.step_timeout_s
        if self.settings.device == "cpu":  # there a start takes a core, and no clock may run beside it
            self.spares.settle()
        begin = time.perf_counter()
        with self.lab.clock():
            spent.capture_s = self.lab.capture(worker)
            spent.swap_s = time.perf_counter() - spent.begin
            blocks, pairs = self._timed(forward, worker, candidate)
        spent.clock_s = time.perf_counter() - begin - spent.capture_s
        begin = time.perf_counter()
        answers = [answer for _, block in blocks for answer in block.answers]
        chosen = secrets.SystemRandom().sample(answers, min(CHECKED_ANSWERS, len(answers)))
        check.require_right(self.reference, chosen, self.layers, self.bounds.logit_gap)
        spent.check_s += time.perf_counter() - begin
        return self._figures(blocks, pairs)

    def _check_eagerly(self, candidate: measure.Side, arena: Arena) -> None:
        """A few fresh requests before any clock runs: logits finite, every emitted token right. Warms the worker up too."""
        drawn, prompts = self.replay()
        shapes = [dataclasses.replace(shape, output_tokens=3) for shape in drawn[:WARM_REQUESTS]]
        try:
            block = measure.run_block(candidate.core, candidate.forward, shapes, prompts[:WARM_REQUESTS], WARM_REQUESTS)
        except CandidateError as error:
            if error.outcome == Outcome.NOT_FINITE:
                check.require_written(arena.logits(1))
            raise
        check.require_finite(arena.logits(len(shapes)))
        check.require_right(self.reference, block.answers, self.layers, self.bounds.logit_gap)

    def _require_good_conduct(self, worker: RemoteExecutor, before: Census) -> None:
        settings = self.settings
        conduct.require_decent(before, worker.ward.census(), settings.threads, settings.device)
        ours = list(worker.resident)
        conduct.require_steady(ours, list(self.incumbent_worker.resident)[-len(ours) :])

    def _timed(
        self, forward: Forward, worker: RemoteExecutor, candidate: measure.Side
    ) -> tuple[list[tuple[measure.Block, measure.Block]], list[tuple[float, float]]]:
        """Again from the start each time the incumbent's worker died meanwhile: the candidate is not to blame for that."""
        for _ in range(INCUMBENT_RETRIES + 1):
            try:
                return self._time(candidate)
            except CandidateError as error:
                if self.incumbent_worker.alive or not worker.alive:
                    raise
                log_event(self.config.night, "incumbent_died", worker=self.incumbent_worker.pid, message=error.message)
                candidate = measure.Side.of(forward.id, new_core(self.settings), worker)
        raise IncumbentLost(
            f"the incumbent's worker died {INCUMBENT_RETRIES + 1} times: nothing is known of the candidate"
        )

    def _time(
        self, candidate: measure.Side
    ) -> tuple[list[tuple[measure.Block, measure.Block]], list[tuple[float, float]]]:
        blocks, pairs = [], []
        deadline = time.monotonic() + self.config.trial_s
        for _ in range(self.config.passes):
            a, b, steps = measure.lockstep(self._incumbent_side(), candidate, *self.replay())
            blocks.append((a, b))
            pairs += steps
            found = measure.ratio_of_steps(pairs)
            better = measure.with_noise_floor(found, self.noise).low > 1
            sure = len(pairs) >= MIN_PAIRS and (better or found.high - found.low < 2 * PRECISE)
            if found.ratio < HOPELESS or sure or time.monotonic() > deadline:
                break  # decided either way; the final score is another measurement
        return blocks, pairs

    def _incumbent_side(self) -> measure.Side:
        if not self.incumbent_worker.alive:
            self.lab.release(self.incumbent_worker)
            self.incumbent_worker = self._start_incumbent()
        return measure.Side.of(self.incumbent.id, new_core(self.settings), self.incumbent_worker)

    def _figures(self, blocks: list[tuple[measure.Block, measure.Block]], pairs: list[tuple[float, float]]) -> Figures:
        self._require_possible(min(b for _, b in pairs))
        return measure.figures_of(measure.with_noise_floor(measure.ratio_of_steps(pairs), self.noise), blocks)

    def floor_s(self) -> float:
        """Least seconds of one step: weights that must move, less what the cache can hold, over the spec sheet's bandwidth."""
        if self.config.bandwidth_bytes_per_s is None:
            return 0.0
        embedding = self.lab.config.vocab_size * self.lab.config.hidden_size * ITEM_BYTES[self.lab.settings.dtype]
        moved = (
            self.lab.weights_bytes - (0 if self.lab.config.tie_word_embeddings else embedding) - self.config.cache_bytes
        )
        return max(0.0, moved / self.config.bandwidth_bytes_per_s)

    def _require_possible(self, fastest_s: float) -> None:
        if fastest_s < self.floor_s():
            raise CandidateError(
                "too_fast", f"a step of {1e3 * fastest_s:.3g} ms is under the floor, {1e3 * self.floor_s():.3g} ms"
            )


def environment() -> dict[str, Any]:
    """What a figure depends on besides source: machine, kernel, Python, load."""
    from importlib.metadata import version

    with open("/proc/loadavg") as file:
        load = file.read().split()[0]
    return {
        "machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version(),
        "torch": version("torch"), "load_1min": float(load),
    }  # fmt: skip
