"""Is an answer right? Each emitted token's reference logit, teacher-forced on the candidate's own chain, must lie within
the derived bound of the reference's maximum. Token-for-token equality is not asked: reduction order may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tideforge.engine.measure import Answer
from tideforge.engine.memory import UNTOUCHED
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from tideforge.engine.reference import Reference


@dataclasses.dataclass(frozen=True)
class Shortfall:
    """The worst token of some answers: how far its reference logit lies below the reference's maximum."""

    gap: float
    answer: int
    position: int
    token: int
    expected: int


def worst(reference: Reference, answers: Sequence[Answer], layers: range) -> Shortfall:
    """The largest gap over all tokens of `answers`, in logits."""
    found = Shortfall(0.0, 0, 0, -1, -1)
    chains = [(answer.prompt + answer.tokens, len(answer.prompt)) for answer in answers]
    for index, (top, emitted, argmax) in enumerate(reference.scores(chains, layers)):
        gaps = np.nan_to_num(top - emitted, nan=np.inf)
        at = int(np.argmax(gaps))
        if gaps[at] > found.gap:
            found = Shortfall(float(gaps[at]), index, at, answers[index].tokens[at], int(argmax[at]))
    return found


def require_right(reference: Reference, answers: Sequence[Answer], layers: range, bound: float) -> Shortfall:
    """Raises CandidateError("wrong") with the evidence when any emitted token lies below the bound."""
    found = worst(reference, answers, layers)
    if found.gap > bound:
        raise CandidateError(
            "wrong",
            f"answer {found.answer}, token {found.position}: emitted {found.token}, the reference prefers {found.expected} "
            f"by {found.gap:.4g} logits; the bound is {bound:.4g}",
        )
    return found


def require_written(logits: np.ndarray) -> None:
    """Raises CandidateError("not_run") when a row still holds what the worker filled it with before the step."""
    untouched = (logits.view(np.uint32) == UNTOUCHED).all(axis=1)
    if untouched.any():
        raise CandidateError("not_run", f"{int(untouched.sum())} of {len(logits)} logits rows were left untouched")


def require_finite(logits: np.ndarray) -> None:
    """Raises CandidateError: rows that were never written, others that are not finite."""
    require_written(logits)
    bad = ~np.isfinite(logits)
    if bad.any():
        raise CandidateError("not_finite", f"{int(bad.sum())} of {bad.size} logits are not finite")
