"""Gate of precision: the errors that a cheaper arithmetic would make must not show among the candidate's."""

from __future__ import annotations

from typing import Any

import numpy as np

from tideforge.engine import matched
from tideforge.engine.cheaper_names import NAMES
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.gates.forced import candidate_logits, order_logits
from tideforge.engine.gates.probe import Probe
from tideforge.engine.limits import kind, limits

SPANS, ROWS, START = 2, 24, 16  # of a round: texts, rows of each that are compared, tokens before them
LONG = 128  # tokens of a longer context that a CPU affords for all filters
TIMES = 3  # that a cheaper arithmetic must show, on fresh text each: noise alone passes a limit now and then
ROUNDS = 4  # most, until every filter would show half of a whole cheat's error
LEAST = 1 / 8  # of a cheaper arithmetic's error: who lowers less gains less, and what is below is the quality gate's

Readings = dict[str, matched.Reading]  # by cheaper arithmetic


def precision(probe: Probe) -> dict[str, Any]:
    """A matched filter (engine/matched.py) for each cheaper arithmetic, behind short and behind longer contexts. One that shows must
    show on fresh text again. Filters without power are what the gate is blind to; where none has any it cannot tell."""
    short = _judged(probe, START)
    room = min(LONG, probe.limits.max_model_len, len(probe.text) // 2)
    if room < 2 * START + ROWS:
        return {**short, "blind": unseen(short)}
    long = _judged(probe, START + ROWS + probe.secret() % (room - START - 2 * ROWS + 1))
    return {**short, "long": long, "blind": unseen(short, long)}


def unseen(*judged: dict[str, Any]) -> str:
    """Of the figures at each place. Raises Unverifiable where no filter has power."""
    if not any(set(figures["shares"]) - set(figures["without_power"]) for figures in judged):
        raise Unverifiable("half of the error of no cheaper arithmetic would show beside what honest orders make")
    return "; ".join(
        f"{', '.join(weak)} behind {figures['behind']} tokens: half of such an error would not show in {figures['rows']} logits rows, "
        f"it takes {max(figures['rows_needed'][name] for name in weak)}"
        for figures in judged
        if (weak := figures["without_power"])
    )


def _judged(probe: Probe, start: int) -> dict[str, Any]:
    """Of rows from `start` on."""
    dtype = probe.arena.layout.dtype
    deviations = limits(dtype, kind(probe.reference.config)).deviations
    suspects: set[str] = set(NAMES[dtype])
    for _ in range(TIMES):
        found = _found(probe, dtype, deviations, start)
        bounds = {name: max(reading.bound(deviations), LEAST) for name, reading in found.items()}
        suspects &= {name for name, reading in found.items() if not reading.share <= bounds[name]}
        if not suspects:
            return {"behind": start, **_figures(found, bounds, deviations)}
    # cheaper arithmetics have errors in common: the one that explains most is named
    name = min((name for name in found if name in suspects), key=lambda name: abs(found[name].share - 1))
    raise Caught(
        f"{name}: {found[name].share:.3f} of the error that it makes shows in {found[name].rows} logits rows behind {start} tokens, and "
        f"did on {TIMES - 1} other texts; an honest forward stays below {bounds[name]:.3f}"
    )


def _found(probe: Probe, dtype: str, deviations: float, start: int) -> Readings:
    """On fresh text, as much as tells, or ROUNDS of it."""
    filters = Filters(dtype)
    for _ in range(ROUNDS):
        filters.round(probe, start)
        found = filters.readings()
        if not weak(found, deviations):
            break
    return found


def weak(found: Readings, deviations: float) -> list[str]:
    """Filters that half of a whole cheat's error would not show in."""
    return [name for name, reading in found.items() if reading.bound(deviations) > matched.HALF]


def _figures(found: Readings, bounds: dict[str, float], deviations: float) -> dict[str, Any]:
    return {
        "rows": max((reading.rows for reading in found.values()), default=0),
        "shares": {name: reading.share for name, reading in found.items()},
        "bounds": bounds,
        "rows_needed": {name: reading.rows_needed(deviations) for name, reading in found.items()},
        "without_power": weak(found, deviations),
    }


class Filters:
    """Errors of the candidate, of honest orders and of each cheaper arithmetic, round by round; each a list of [N, V]."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.candidate: list[np.ndarray] = []
        self.orders: list[list[np.ndarray]] = []
        self.cheaper: dict[str, list[np.ndarray]] = {name: [] for name in NAMES[dtype]}

    def round(self, probe: Probe, start: int) -> None:
        """Errors are counted from the reference on weights as the endpoint stores them."""
        spans = probe.spans([start + ROWS] * SPANS)
        base = probe.reference.after(spans, start, probe.layers, "", self.dtype)
        self.candidate.append(matched.centred(candidate_logits(probe, spans, start) - base))
        self.orders.append([matched.centred(order - base) for order in order_logits(probe, spans, start)])
        for name, seen in self.cheaper.items():
            seen.append(matched.centred(probe.reference.after(spans, start, probe.layers, name, self.dtype) - base))

    def readings(self) -> Readings:
        errors = np.concatenate(self.candidate)
        orders = [np.concatenate(order) for order in zip(*self.orders, strict=True)]
        found = {name: matched.reading(errors, orders, np.concatenate(seen)) for name, seen in self.cheaper.items()}
        return {name: reading for name, reading in found.items() if reading is not None}
