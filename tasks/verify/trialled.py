"""Both workers of one verification, side by side, until closed; and blocks that are timed on them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import check, measure
from tideforge.engine import load as loads
from tideforge.engine.compare import Bounds
from tideforge.engine.config import Settings
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import Forward
from tideforge.engine.gates.probe import POISON, Probe
from tideforge.engine.held import Held, of_worker
from tideforge.engine.lab import Lab
from tideforge.engine.memory import Arena
from tideforge.engine.objective import Objective
from tideforge.engine.outlive import outlive
from tideforge.engine.possible import floor_s
from tideforge.engine.reference import Reference
from tideforge.engine.service_config import PLAIN, for_trials, new_core
from tideforge.errors import CandidateError, IncumbentLost
from tideforge.tasks.verify.idle import Idle
from tideforge.tasks.verify.seal import Seal

Replay = Callable[[str, RemoteExecutor], measure.Block]  # of a forward on its worker
Pair = tuple[measure.Block, measure.Block]  # incumbent's and candidate's
STEP_TIMEOUT_S = 60.0
CHECKED_ANSWERS = 2  # of every timed block, besides the gates
T = TypeVar("T")
FRESH = "verify-fresh"  # arena of workers that a gate starts for itself


class Trialled:
    """The candidate's worker starts when it is first asked for: CandidateError then says what it did."""

    def __init__(
        self,
        settings: Settings,
        events: Path,
        incumbent: Forward,
        candidate: Forward,
        workload: Workload,
        bounds: Bounds,
        objective: Objective = PLAIN,
        noise: Sequence[float] = (),
        protected: Sequence[Path] = (),
    ) -> None:
        settings = for_trials(settings, workload, objective)
        self.lab, self.events = Lab(settings, events), events
        self.incumbent, self.candidate, self.workload, self.bounds = incumbent, candidate, workload, bounds
        self.objective, self.noise = objective, noise
        self.settings = settings.with_knobs(incumbent.knobs)
        self.reference = Reference.start(settings.model, settings.state, device=settings.device)
        self._begin(protected)
        self.a = self._incumbent()

    def _begin(self, protected: Sequence[Path]) -> None:
        """What every verification begins with, whoever provides its lab, reference and incumbent."""
        self.corpus = self.workload.corpus[len(self.workload.corpus) // 2 :]
        self.layers = range(self.lab.config.num_hidden_layers)
        self.arena = self.lab.arena("verify-candidate")
        self.arena.fill(POISON)
        self._b: RemoteExecutor | None = None
        self.blocks: list[Pair] = []
        self.looks: list[Held | None] = []  # at what the candidate's worker holds; None: it was not shown
        self.answers_s = 0.0  # what looking at their answers has taken
        self.idle = Idle(self.lab.settings.threads)
        folders = [forward.save(self.settings.state / "forwards") for forward in (self.incumbent, self.candidate)]
        self.seal = Seal.of([*protected, *folders])

    @property
    def b(self) -> RemoteExecutor:
        if self._b is None:
            self._b = self._worker(self.candidate, self.arena)
        return self._b

    def _incumbent(self) -> RemoteExecutor:
        try:
            return self._worker(self.incumbent, self.lab.arena("verify-incumbent"))
        except CandidateError as error:
            raise IncumbentLost(f"the incumbent's worker did not start: {error.message}") from error

    def _worker(self, forward: Forward, arena: Arena) -> RemoteExecutor:
        worker = self.lab.spawn(forward, arena)
        worker.step_timeout_s = STEP_TIMEOUT_S
        self.lab.capture(worker)
        return worker

    @contextlib.contextmanager
    def fresh(self, forward: Forward) -> Iterator[Probe]:
        """One more worker, on pages of its own, as a gate sees it. It and they are gone afterwards."""
        arena = self.lab.arena(FRESH)
        arena.fill(POISON)
        worker = self._worker(forward, arena)
        try:
            yield dataclasses.replace(self.probe(), worker=worker, arena=arena)
        finally:
            self.lab.release(worker)
            self.lab.ask_keeper({"type": "drop", "name": FRESH})

    def look(self) -> None:
        """At what the candidate's worker holds now, if it lives."""
        if self._b is not None and self._b.alive:
            self.looks.append(of_worker(self._b.ward, self.settings.device))

    def close(self) -> None:
        self.reference.close()
        self.lab.close()

    def probe(self) -> Probe:
        return Probe(
            self.candidate.id, self.b, self.arena, self.reference, self.settings.limits, self.layers, self.bounds, self.corpus,
            lambda: secrets.randbits(63), self.workload.held_out, self.workload.users, self.settings.capture_rows,
            self.workload.context_p99,
        )  # fmt: skip

    def warm(self) -> None:
        """One short replay on each side: the first pass of a process packs, allocates and faults pages in."""
        self._both(self._short)

    @property
    def _short(self) -> list[RequestShape]:
        return [dataclasses.replace(shape, output_tokens=2, turns=()) for shape in self.workload.held_out]

    def floor_s(self, bandwidth_bytes_per_s: float | None, cache_bytes: int) -> float:
        lab = self.lab
        return floor_s(lab.config, lab.settings.dtype, lab.weights_bytes, bandwidth_bytes_per_s, cache_bytes)

    def timed_pair(self) -> None:
        pair = self._both(self.workload.held_out, turned=len(self.blocks) % 2 == 1)
        self.blocks.append(pair)
        answers = secrets.SystemRandom().sample(pair[1].answers, min(CHECKED_ANSWERS, len(pair[1].answers)))
        begin = time.perf_counter()
        check.require_right(self.reference, answers, self.layers, self.bounds.logit_gap)
        self.answers_s += time.perf_counter() - begin

    def _both(self, part: Sequence[RequestShape], turned: bool = False) -> Pair:
        """A pair of blocks; again when the incumbent's worker died under it, for which the candidate is not to blame."""

        return self.clocked(lambda: self._pair(part, turned))

    def clocked(self, attempt: Callable[[], T]) -> T:
        """What an attempt gives that has the device to itself and a living incumbent, however often that has to be started."""

        def alone() -> T:
            self._revive()
            with self.lab.clock():
                return attempt()

        return outlive(self.events, self.b, lambda: self.a, alone)

    def _revive(self) -> None:
        if not self.a.alive:
            self.lab.release(self.a)
            self.a = self._incumbent()
            self._pair(self._short)

    def _pair(self, part: Sequence[RequestShape], turned: bool = False) -> Pair:
        replay = self.replay(part)
        a, b = self.a, self.b

        def incumbents() -> measure.Block:
            with self.idle.watching(b.ward):
                return replay(self.incumbent.id, a)

        if turned:
            ours = replay(self.candidate.id, b)
            return incumbents(), ours
        theirs = incumbents()
        return theirs, replay(self.candidate.id, b)

    def replay(self, part: Sequence[RequestShape]) -> Replay:
        """Of fresh requests, the same ones each time it is called."""
        return (self._load if self.objective.by_loads(part) else self._requests)(part)

    def _requests(self, part: Sequence[RequestShape]) -> Replay:
        """One a user, all at once."""
        shapes, prompts = measure.draw_replay(part, self.workload.users, self.corpus, secrets.randbits(64))

        def replay(forward: str, worker: RemoteExecutor) -> measure.Block:
            side = measure.Side.of(forward, new_core(self.settings), worker)
            return measure.run_block(side.core, forward, shapes, prompts, self.workload.users)

        return replay

    def _load(self, part: Sequence[RequestShape]) -> Replay:
        """A load of the objective's."""
        longest = min(self.settings.limits.max_model_len, len(self.corpus) - 1)
        load = self.objective.load_of(part, self.workload.users, longest, random.Random(secrets.randbits(64)))
        script = loads.draw_script(load, self.corpus, secrets.randbits(64))

        def replay(forward: str, worker: RemoteExecutor) -> measure.Block:
            side = measure.Side.of(forward, loads.core_for(self.settings, load), worker)
            return loads.run_load(side, load, script).block

        return replay
