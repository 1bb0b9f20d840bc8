"""The cheap gates, on every candidate that a search would keep, in the very worker that was timed."""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING

from tideforge.engine.gates import CHEAP, GATES
from tideforge.engine.gates.caught import Caught
from tideforge.engine.gates.probe import Probe
from tideforge.engine.outcome import SLOW, Figures, Outcome
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from tideforge.engine.evaluate import Bench
    from tideforge.engine.prepared import Prepared


def worth_it(tier: str, figures: Figures) -> bool:
    """Whether the search could choose it: passed with all its layers, and faster beyond doubt."""
    return tier == SLOW and figures.ci_low > 1


def climb(bench: Bench, prepared: Prepared) -> None:
    """In random order. Raises CandidateError("failed_gate") with the gate's name and evidence, or what the worker did."""
    worker = prepared.staged
    worker.step_timeout_s = max(bench.step_timeout_s, bench.stage_timeout_s())  # other sizes may compile
    probe = Probe(
        prepared.forward.id, worker, worker.arena, bench.reference, bench.settings.limits, bench.layers, bench.bounds,
        bench.corpus, lambda: secrets.randbits(63),
    )  # fmt: skip
    for name in random.Random(secrets.randbits(64)).sample(CHEAP, len(CHEAP)):
        try:
            GATES[name](probe)
        except Caught as caught:
            raise CandidateError(Outcome.FAILED_GATE, f"{name}: {caught}") from None
