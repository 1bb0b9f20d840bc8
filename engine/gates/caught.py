"""What a gate raises, and what several gates require alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tideforge.engine import check
from tideforge.engine.gates.probe import Probe
from tideforge.engine.measure import Answer
from tideforge.errors import TideforgeError


class Caught(TideforgeError):
    """A gate saw a fault; the message is its evidence: request, token, layer, expected, got."""


def require_right(probe: Probe, chains: Mapping[str, Sequence[int]], prompts: Mapping[str, tuple[int, ...]]) -> float:
    """Every emitted token within the derived bound of the reference's maximum; the worst gap in logits."""
    names = list(chains)
    answers = [Answer(prompts[name], tuple(chains[name]), ()) for name in names]
    found = check.worst(probe.reference, answers, probe.layers)
    if found.gap > probe.bounds.logit_gap:
        raise Caught(
            f"request {names[found.answer]}, token {found.position}: emitted {found.token}, the reference prefers "
            f"{found.expected} by {found.gap:.4g} logits; the bound is {probe.bounds.logit_gap:.4g}"
        )
    return found.gap
