"""Gates of long context: answers after as much text as pages and traffic hold, and what lies far back must still count."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tideforge.engine import compare, matched
from tideforge.engine.gates.caught import Caught, other_on_top
from tideforge.engine.gates.forced import candidate_logits
from tideforge.engine.gates.probe import Probe
from tideforge.engine.limits import kind, safety

AFFORDED = 1024  # tokens of context that a gate can afford where the reference runs on a CPU
AFFORDED_ON_DEVICE = 8192
ANSWER = 6  # tokens
NEEDLE = 24
DRAWS = 3  # of needles, until one moves the reference's logits beyond noise


def long_context(probe: Probe) -> dict[str, Any]:
    """Two texts as long as traffic, pages, limits and text allow, alike but for a needle somewhere in their first half, part of
    which comes again at the end. The last tokens' argmax must be right, and from one text to the other logits move as the
    reference's: each by that much within noise and, over all logits, by more than half and less than one and a half times it.
    """
    room = longest(probe)
    noise = probe.bounds.logit_gap / 2 / safety(probe.arena.layout.dtype, kind(probe.reference.config))
    for _ in range(DRAWS):
        texts, far = needles(probe, room)
        expected = probe.reference.after(texts, room - ANSWER, probe.layers)
        moved = expected[ANSWER:] - expected[:ANSWER]
        shows = bool(np.abs(moved).max() > 4 * noise)  # both sides of a difference are off
        if shows:
            break
    got = candidate_logits(probe, texts, room - ANSWER)
    violations = compare.top1_violations(expected, got, probe.bounds.logit_gap)
    if violations.size:
        at = int(violations[0])
        why = other_on_top(expected[at], got[at], probe.bounds.logit_gap)
        raise Caught(f"{place(at, room)}: {why}; {violations.size} such in all")
    moves = got[ANSWER:] - got[:ANSWER]
    off = np.abs(moves - moved).max(axis=1)
    if not off.max() <= 2 * probe.bounds.logit:
        at = int(np.nan_to_num(off, nan=np.inf).argmax())
        raise Caught(
            f"{place(ANSWER + at, room)}: {NEEDLE} tokens {far} back move the reference's logits by up to "
            f"{np.abs(moved[at]).max():.4g}, the candidate's otherwise by up to {off[at]:.4g}; bound {2 * probe.bounds.logit:.4g}"
        )
    share = float(np.median(matched.shares(matched.centred(moves), matched.centred(moved))))
    if shows and not abs(share - 1) < matched.HALF:
        raise Caught(
            f"{place(ANSWER, room)} and on: {NEEDLE} tokens {far} back move the candidate's logits by {share:.3f} of what they "
            f"move the reference's; it must be within {matched.HALF} of 1"
        )
    return {
        "context": room, "needle_tokens_back": far, "needle_moves": float(np.abs(moved).max()), "needle_shows": shows,
        "share": share, "moved_otherwise": float(off.max()), "bound": 2 * probe.bounds.logit,
        "blind": "" if shows else unseen(far, float(np.abs(moved).max()), 4 * noise),
    }  # fmt: skip


def unseen(far: int, moved: float, least: float) -> str:
    return (
        f"how much of what lies {far} tokens back is read: in {DRAWS} draws no needle moved the reference's logits beyond noise, the last "
        f"one by {moved:.4g}, where {least:.4g} would show"
    )


def place(row: int, room: int) -> str:
    return f"request {'with' if row < ANSWER else 'without'} the needle, token {room - ANSWER + row % ANSWER}"


def longest(probe: Probe) -> int:
    """The traffic's longest, as far as pages, limits, text and machine go."""
    layout = probe.arena.layout
    afforded = AFFORDED if probe.arena.keeping is None else AFFORDED_ON_DEVICE
    room = min((layout.num_blocks - 1) * layout.block_size, probe.limits.max_model_len, len(probe.text) // 2, afforded)
    return min(room, max(probe.context, 4 * NEEDLE)) if probe.context else room


def needles(probe: Probe, length: int) -> tuple[list[tuple[int, ...]], int]:
    """Two texts of that length, and how far the needle lies back from their end. Both end in the first one's needle."""
    text, *pair = probe.spans([length, NEEDLE, NEEDLE])
    at = probe.secret() % max(1, (length - 2 * NEEDLE) // 2)
    parts = [(text[:at], needle, text[at + NEEDLE : length - NEEDLE], pair[0]) for needle in pair]
    return [tuple(itertools.chain(*part)) for part in parts], length - at - NEEDLE
