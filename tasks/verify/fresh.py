"""Gates in workers of their own: the candidate on weights that nobody knew, and a marked copy of the candidate."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import numpy as np

from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.gates import asked
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.gates.probe import Probe, Recorder, drain
from tideforge.errors import CandidateError
from tideforge.tasks.verify.trialled import Trialled

PROMPT, EMITTED = 24, 6  # tokens
MOVED = 2.0  # times the bound that the reference must have moved, or the weights would show nothing
MARKER = """

_{name} = build


def build(ctx):
    {name} = _{name}(ctx)

    def forward(batch):
        {name}(batch)
        batch.logits[:, {token}] += {amount!r}

    return forward
"""


def other_weights(trialled: Trialled) -> dict[str, Any]:
    """On weights that a seed drawn now has changed (engine/perturb.py), the answers and pages are those of the reference on the
    same weights: what a forward knows beforehand of weights, layers, experts or answers is then wrong."""
    seed = secrets.randbits(63)
    reference = trialled.reference.perturbed(seed)
    with trialled.lab.other_weights(seed) as problem:
        if problem:
            raise Unverifiable(f"other weights: {problem}")
        bounds = reference.bounds(trialled.settings.dtype, trialled.corpus)
        try:
            with trialled.fresh(trialled.candidate) as probe:
                other = dataclasses.replace(probe, reference=reference, bounds=bounds)
                moved = _moved(other, trialled.probe())
                return {**asked("quality", other), **asked("written_kv", other), "moved": moved}
        except CandidateError as error:
            if trialled.settings.device != "cpu" and error.outcome == "out_of_memory":
                raise Unverifiable(f"other weights: no room for one more worker ({error.message})") from None
            raise


def _moved(other: Probe, plain: Probe) -> float:
    """How far the reference's own logits moved, in bounds. Unverifiable when that is too little to show anything."""
    tokens = plain.spans([PROMPT])[0]
    was, now = (probe.reference.logits(tokens, layers=probe.layers) for probe in (plain, other))
    moved = float(np.abs(now - was).max()) / max(plain.bounds.logit, other.bounds.logit)
    if not moved > MOVED:
        raise Unverifiable(f"other weights: the reference's answer moved by {moved:.3g} times the bound alone")
    return moved


def sentinel(trialled: Trialled) -> dict[str, Any]:
    """A secret amount that a copy of the candidate adds to a secret token's logit shows in prefill and in decode, and nowhere
    else: this source is what runs."""
    token = secrets.randbelow(trialled.lab.config.vocab_size)
    amount = float(trialled.bounds.logit * (16 + 16 * secrets.SystemRandom().random()))
    shown = []
    with trialled.fresh(marked(trialled.candidate, token, amount)) as probe:
        span = probe.spans([PROMPT + EMITTED])[0]
        recorder = Recorder(probe.worker, probe.arena, forced={"s": span[PROMPT:]})
        drain(probe.core(recorder), [probe.request("s", span[:PROMPT], EMITTED)], 1)
        expected = probe.reference.logits(span, range(PROMPT - 1, PROMPT + EMITTED - 1), probe.layers)
        for place, (row, right) in enumerate(zip(recorder.rows["s"], expected, strict=True)):
            shown.append(_require_marked(row.logits - right, place, token, amount, probe.bounds.logit))
    return {"marked": amount, "seen_least": min(shown), "seen_most": max(shown), "bound": trialled.bounds.logit}


def marked(forward: Forward, token: int, amount: float) -> Forward:
    text = MARKER.format(name=f"inner_{secrets.token_hex(4)}", token=token, amount=amount)
    return forward.with_file(ENTRY, forward.files[ENTRY] + text)


def _require_marked(moved: np.ndarray, place: int, token: int, amount: float, bound: float) -> float:
    """`moved`: the copy's logits less the reference's, [V]. What the marked token's moved by."""
    seen = float(moved[token])
    where = "prefill" if place == 0 else f"decode {place}"
    if not abs(seen - amount) <= bound:
        raise Caught(
            f"{where}, token {token}: the marked copy's logit moved by {seen:.4g}, expected {amount:.4g}, bound {bound:.4g}: "
            "other code than this source answers"
        )
    return seen
