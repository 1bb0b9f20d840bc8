"""Gates of quality: the candidate's probabilities against the reference's, on real text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tideforge.engine import compare
from tideforge.engine.gates.caught import Caught, Unverifiable, other_on_top
from tideforge.engine.gates.forced import candidate_logits, order_logits
from tideforge.engine.gates.probe import Probe
from tideforge.engine.limits import kind, limits

COUNT, LENGTH, START = 6, 40, 16  # spans, their tokens, and from which on a token is compared
QUESTIONS, OPTIONS, STEM, ENDING = 4, 4, 24, 8  # of the task: tokens before and of an option


def quality(probe: Probe) -> dict[str, Any]:
    """Teacher-forced: KL of the reference to the candidate, its median, mean, P99 and maximum a token, each within what
    honest forwards show over the reference's own orders on the same tokens; argmax within the derived gap."""
    spans = probe.spans([LENGTH] * COUNT)
    expected = probe.reference.after(spans, START, probe.layers)
    got = candidate_logits(probe, spans, START)
    violations = compare.top1_violations(expected, got, probe.bounds.logit_gap)
    if violations.size:
        at = violations[0]
        why = other_on_top(expected[at], got[at], probe.bounds.logit_gap)
        raise Caught(f"{place(at)}: {why}; {violations.size} such in all")
    kl = compare.kl(expected, got)
    orders = [compare.Spread.of(compare.kl(expected, other)) for other in order_logits(probe, spans, START)]
    mine, most = compare.Spread.of(kl), limits(probe.arena.layout.dtype, kind(probe.reference.config))
    for figure, ratio in mine.over(orders).items():
        allowed = getattr(most, f"kl_{figure}")
        if not ratio <= allowed:
            raise Caught(
                f"{figure} KL of {getattr(mine, figure):.4g} nats a token, {ratio:.4g} times that of the reference's own "
                f"orders; honest forwards stay below {allowed:.4g}; the worst is {place(int(kl.argmax()))}, {kl.max():.4g} nats"
            )
    return {
        **{f"kl_{name}": value for name, value in dataclasses.asdict(mine).items()},
        **{f"kl_{name}_of_limit": ratio / getattr(most, f"kl_{name}") for name, ratio in mine.over(orders).items()},
        "top1_agreement": compare.top1_agreement(expected, got), "tokens": int(kl.size),
    }  # fmt: skip


def place(row: int) -> str:
    return f"request {row // (LENGTH - START)}, token {START + row % (LENGTH - START)}"


def task_score(probe: Probe) -> dict[str, Any]:
    """Which of four endings a text goes on with, the true one among them: the candidate chooses as the reference does.

    Where it chooses otherwise, the reference must put both endings within what noise can move them: by what its own orders
    move an ending at most, times how much larger honest errors are (the root of the limit of KL's P99, which is quadratic).
    """
    rng = np.random.default_rng(probe.secret())
    texts = probe.spans([STEM + ENDING] * QUESTIONS)
    others = iter(probe.spans([ENDING] * (QUESTIONS * (OPTIONS - 1))))
    true = rng.integers(0, OPTIONS, QUESTIONS)
    spans = []
    for question, text in enumerate(texts):
        wrong = [text[:STEM] + next(others) for _ in range(OPTIONS - 1)]
        spans += [*wrong[: true[question]], text, *wrong[true[question] :]]
    reference = likelihoods(spans, probe.reference.after(spans, STEM, probe.layers))
    candidate = likelihoods(spans, candidate_logits(probe, spans, STEM))
    preferred, chosen = reference.argmax(1), candidate.argmax(1)
    moved = max(float(np.abs(likelihoods(spans, o) - reference).max()) for o in order_logits(probe, spans, STEM))
    bound = 2 * moved * math.sqrt(limits(probe.arena.layout.dtype, kind(probe.reference.config)).kl_p99)
    gaps = reference.max(1) - np.take_along_axis(reference, chosen[:, None], 1)[:, 0]
    for at in np.flatnonzero(~(gaps <= bound) | ~np.isfinite(candidate).all(axis=1)):
        raise Caught(
            f"question {at}: chose ending {chosen[at]}, the reference prefers {preferred[at]} by "
            f"{gaps[at]:.4g} nats; the bound is {bound:.4g}"
        )
    widest = float(np.ptp(reference, axis=1).max())
    if not widest > bound:
        raise Unverifiable(
            f"noise moves an ending by {bound:.4g} nats, and no two of a question are further apart than {widest:.4g}"
        )
    return {
        "score": float((chosen == true).mean()), "reference_score": float((preferred == true).mean()),
        "agreement": float((chosen == preferred).mean()), "questions": QUESTIONS, "bound": bound,
    }  # fmt: skip


def likelihoods(spans: list[tuple[int, ...]], logits: np.ndarray) -> np.ndarray:
    """Of every option's ending, nats, [questions, options]."""
    tokens = np.array([span[STEM:] for span in spans]).reshape(-1, 1)
    each = np.take_along_axis(compare.log_softmax(logits), tokens, 1)
    return np.asarray(each.reshape(QUESTIONS, OPTIONS, ENDING).sum(-1))
