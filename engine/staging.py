"""How a candidate gets into a worker of its own, ready to be measured, and how the worker goes again. Needs no clock."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from contextlib import AbstractContextManager
from typing import Any

from tideforge.engine.depths import depths_of
from tideforge.engine.events import log_event
from tideforge.engine.forward import KNOBS
from tideforge.engine.lab import Lab
from tideforge.engine.prepared import Prepared
from tideforge.engine.screen import screen
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.spares import Spares
from tideforge.errors import CandidateError

FAST = "fast"
TIERS = ("slow", FAST)
MAX_STAGE_S = 30.0


class Staging:
    """Of one device. Thread-safe: several candidates are staged at once, beside one that is measured."""

    def __init__(self, lab: Lab, config: ServiceConfig, knobs: dict[str, Any]) -> None:
        """`knobs`: those that every candidate must have."""
        self.lab, self.config, self.knobs = lab, config, knobs
        self.spares = Spares(lab, lab.settings.ahead + 1, config.night)
        self._live: dict[
            str, Prepared
        ] = {}  # by trial: those that have had a worker, whoever prepares or measures them
        self._lock = threading.Lock()

    def stage(self, prepared: Prepared) -> None:
        """Screens, imports, builds and compiles. Raises CandidateError; what `release` must end is in `prepared` then too."""
        self._require_fit(prepared)
        self._into_a_spare(prepared)
        shapes = self.lab.settings.dry_shapes
        with prepared.spent.on("dry_s"):
            whole = not shapes or prepared.staged.dry(shapes, self.timeout_s)
        prepared.compiled = whole and bool(shapes)
        if not whole:  # a capture that failed leaves its worker worse than it was
            self.afresh(prepared)

    def afresh(self, prepared: Prepared) -> None:
        """Into another worker, where it compiles when it is first run. The caller does not hold the clock."""
        worker, prepared.worker, prepared.compiled = prepared.staged, None, False
        with self.quiet():
            self.spares.release(worker)
        self._into_a_spare(prepared)

    @property
    def timeout_s(self) -> float:
        """Imports and builds may compile, so they get more time than a step."""
        return min(MAX_STAGE_S, self.config.trial_s)

    def _require_fit(self, prepared: Prepared) -> None:
        """Raises CandidateError for what can be seen before a worker is spent."""
        if (tier := prepared.trial.tier) not in TIERS:
            raise CandidateError("refused", f"there is no tier {tier!r}; take one of {', '.join(TIERS)}")
        if tier == FAST and (figure := self.config.objective.maximize) != "output_tps":
            raise CandidateError(
                "refused", f"the fast tier measures layers' output_tps, not {figure}; submit to the slow tier"
            )
        screen(prepared.forward, self.config.allow_imports)
        if prepared.forward.knobs != self.knobs:
            frozen = f"knobs are frozen at the incumbent's best, {json.dumps(self.knobs)}; put those into {KNOBS}"
            raise CandidateError("refused", frozen)

    def _into_a_spare(self, prepared: Prepared) -> None:
        with prepared.spent.on("wait_s"):
            worker = prepared.worker = self.spares.take()
        with self._lock:
            self._live[prepared.trial.id] = prepared
        log_event(self.config.night, "trial_worker", trial=prepared.trial.id, worker=worker.pid)
        self.spares.refill()  # beside the staging, so that the next trial need not wait for it
        prepared.before = worker.ward.census()
        layers = self.lab.config.num_hidden_layers
        with prepared.spent.on("stage_s"):
            for depth in depths_of(self.lab.config) if prepared.trial.tier == FAST else (layers,):
                self.lab.stage(worker, prepared.forward, range(depth), self.timeout_s)

    def release(self, prepared: Prepared) -> bool:
        """Ends its worker, if it had one. Whether the weights are as before: if not, all candidates that live now are
        suspect, because any of them can have done it."""
        with self._lock:
            staged = self._live.pop(prepared.trial.id, None) is not None
        if not staged:
            return True
        with self.quiet():
            if prepared.worker is not None:
                self.spares.release(prepared.worker)
            intact = self.lab.weights_intact()
            self.spares.restock()
        self.spares.refill()
        if not intact:
            with self._lock:
                for other in self._live.values():
                    other.suspect = prepared.suspect = True
        return intact

    def stock(self) -> None:
        """The first spares."""
        self.spares.refill()
        with self.quiet():
            self.spares.restock()

    def settle(self) -> None:
        """On the CPU a start takes a core, and no clock may run beside it, unless the settings ask for just that."""
        if self.lab.settings.device == "cpu" and self.lab.settings.ahead == 0:
            self.spares.settle()

    def quiet(self) -> AbstractContextManager[object]:
        """For what moves a GPU's memory: no clock may run on it meanwhile."""
        return contextlib.nullcontext() if self.lab.settings.device == "cpu" else self.lab.clock()

    def abandon(self) -> None:
        """Kills the workers of all candidates; whoever prepares or measures one sees its death."""
        with self._lock:
            workers = [one.worker for one in self._live.values() if one.worker is not None]
        for worker in workers:
            if worker.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
