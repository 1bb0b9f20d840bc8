"""What a gate raises, and what several gates require alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tideforge.engine import check
from tideforge.engine.gates.probe import Probe, Row
from tideforge.engine.measure import Answer
from tideforge.errors import TideforgeError


class Caught(TideforgeError):
    """A gate saw a fault; the message is its evidence: request, token, layer, expected, got."""


class Unverifiable(TideforgeError):
    """A gate cannot be asked here, which is no fault of the candidate's; the message says why, and stands in red for whoever approves."""


def other_on_top(expected: np.ndarray, got: np.ndarray, bound: float) -> str:
    """Evidence of one row, both [V]: the candidate's largest logit, and how far the reference puts it below its own."""
    mine, best = int(got.argmax()), int(expected.argmax())
    return f"{mine} is on top, the reference prefers {best} by {expected[best] - expected[mine]:.4g} logits; the bound is {bound:.4g}"


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


def require_alike(
    runs: Sequence[Mapping[str, Sequence[Row]]], chains: Sequence[Mapping[str, Sequence[int]]], bound: float, what: str
) -> float:
    """Logits of two runs of the same requests differ by no more than the bound: until a tie within it goes the other way.

    Returns the largest difference.
    """
    worst = 0.0
    for name, rows in runs[0].items():
        for step, (a, b) in enumerate(zip(rows, runs[1][name], strict=False)):
            difference = float(np.abs(a.logits - b.logits).max())
            worst = max(worst, difference)
            if not difference <= bound:
                raise Caught(
                    f"request {name}, token {step}: logits differ by {difference:.4g} {what}; bound {bound:.4g}"
                )
            if chains[0][name][step] != chains[1][name][step]:
                break  # from here on the prefixes differ
    return worst
