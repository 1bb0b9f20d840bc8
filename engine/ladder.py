"""The cheap gates in the middle of a search, in the very worker that was timed.

Whoever would be the finalist now always climbs, and the finalist of a search was that when it was measured. Others that gain
beyond doubt climb as far as SHARE of the device's seconds allows, so that no agent builds on what could never ship.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
from typing import TYPE_CHECKING

from tideforge.engine.gates import CHEAP, asked
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.gates.probe import Probe
from tideforge.engine.outcome import SLOW, Figures, Outcome, Trial
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from tideforge.engine.evaluate import Bench
    from tideforge.engine.prepared import Prepared

SHARE = 0.15  # of the device's seconds; would-be finalists come on top
AT_ONCE = 4  # sequences that a gate has under way here; verification takes what the gate asks for


@dataclasses.dataclass
class Ladder:
    """What a bench's slow trials have taken so far, and the best lower bound that has climbed."""

    best: float = 1.0
    device_s: float = 0.0
    gates_s: float = 0.0

    def due(self, tier: str, figures: Figures) -> bool:
        if tier != SLOW or figures.ci_low <= 1:
            return False
        return figures.ci_low > self.best or self.gates_s <= SHARE * self.device_s

    def note(self, trial: Trial) -> None:
        """Counts a finished trial."""
        if trial.tier != SLOW:
            return
        self.device_s += trial.device_s
        self.gates_s += trial.gates_s
        if trial.figures is not None and trial.gates_s:
            self.best = max(self.best, trial.figures.ci_low)


def climb(bench: Bench, prepared: Prepared) -> None:
    """In random order. Raises CandidateError("failed_gate") with the gate's name and evidence, or what the worker did."""
    worker = prepared.staged
    worker.step_timeout_s = max(bench.step_timeout_s, bench.stage_timeout_s())  # other sizes may compile
    limits = bench.settings.limits
    probe = Probe(
        prepared.forward.id, worker, worker.arena, bench.reference,
        dataclasses.replace(limits, max_num_seqs=min(AT_ONCE, limits.max_num_seqs)), bench.layers, bench.bounds,
        bench.corpus, lambda: secrets.randbits(63), bench.workload.search, min(AT_ONCE, bench.workload.users),
        bench.settings.capture_rows,
    )  # fmt: skip
    for name in random.Random(secrets.randbits(64)).sample(CHEAP, len(CHEAP)):
        try:
            with contextlib.suppress(Unverifiable):  # verification says so
                asked(name, probe)
        except Caught as caught:
            raise CandidateError(Outcome.FAILED_GATE, f"{name}: {caught}") from None
