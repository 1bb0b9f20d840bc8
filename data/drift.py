"""Has the traffic drifted from what was tuned for? Pure arithmetic on two profiles; every answer carries its figures.

Two questions, over all requests and region by region. Level: has the median or P90 of prompt or output length moved by
more than the threshold, and by more than three standard errors of the two quantiles? Shape: is the population stability
index (PSI) of the joint histogram, in bins of one octave, above the threshold by more than what sampling alone gives?
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tideforge.data.distribution import outputs, prompts
from tideforge.data.profile_records import BINS_PER_OCTAVE, Cells, Profile

ERRORS_APART = 3.0
PSEUDO_COUNT = 0.5  # added to each cell, so that a cell seen on one side only has a finite index
LEVELS = (("prompt", "p50", 0.5), ("prompt", "p90", 0.9), ("output", "p50", 0.5), ("output", "p90", 0.9))


@dataclasses.dataclass(frozen=True)
class DriftDecision:
    drifted: bool
    reason: str
    figures: dict[str, Any]  # JSON values: scope -> figure -> value


def detect(old: Profile, new: Profile, threshold: float, min_requests: int) -> DriftDecision:
    """Compares `new` with `old`. `threshold` is a relative shift (0.2: 20 %) and the index's limit alike."""
    figures: dict[str, Any] = {
        "threshold": threshold, "min_requests": min_requests,
        "old": old.sha256, "new": new.sha256, "old_requests": old.requests, "new_requests": new.requests,
    }  # fmt: skip
    scopes = {"all": (old.joint, new.joint)}
    for region in sorted(old.regions.keys() | new.regions.keys()):
        before, after = old.regions.get(region), new.regions.get(region)
        scopes[f"region {region}"] = (before.joint if before else (), after.joint if after else ())
    reasons: list[str] = []
    for scope, (before_cells, after_cells) in scopes.items():
        found = compare(before_cells, after_cells, threshold, min_requests)
        figures[scope] = found
        reasons += [f"{scope}: {reason}" for reason in found["reasons"]]
    return DriftDecision(bool(reasons), "; ".join(reasons) or calm(figures, threshold), figures)


def calm(figures: dict[str, Any], threshold: float) -> str:
    if skipped := figures["all"]["skipped"]:
        return f"not judged: {skipped}"
    return f"no shift above {threshold:.0%} in {figures['new_requests']} requests"


def compare(old: Cells, new: Cells, threshold: float, min_requests: int) -> dict[str, Any]:
    """Figures of one scope, with the reasons that speak for drift; `skipped` says why there are no figures."""
    counts = {"old_requests": sum(cell[2] for cell in old), "new_requests": sum(cell[2] for cell in new)}
    for side, number in counts.items():
        if number < max(1, min_requests):
            return {**counts, "skipped": f"{number} {side.replace('_', ' ')}, below {min_requests}", "reasons": []}
    levels = {f"{kind}_{name}": level(kind, probability, old, new) for kind, name, probability in LEVELS}
    index, noise = stability(old, new)
    reasons = [
        f"{name} moved by {found['shift']:+.0%} ({found['old']:.0f} to {found['new']:.0f} tokens)"
        for name, found in levels.items()
        if abs(found["shift"]) > threshold and found["errors_apart"] > ERRORS_APART
    ]
    if index - noise > threshold:
        reasons.append(f"the joint histogram's stability index is {index:.2f} ({noise:.2f} by sampling alone)")
    return {**counts, "skipped": "", **levels, "psi": index, "psi_noise": noise, "reasons": reasons}


def level(kind: str, probability: float, old: Cells, new: Cells) -> dict[str, float]:
    """A quantile on both sides, interpolated in its bin; the shift; and the shift in standard errors."""
    binned = prompts if kind == "prompt" else outputs
    before, after = binned(old), binned(new)
    first, second = before.quantile(probability), after.quantile(probability)
    error = math.hypot(before.standard_error(probability), after.standard_error(probability))
    return {
        "old": first, "new": second, "shift": second / first - 1,
        "errors_apart": abs(second - first) / error if error else 0.0,
    }  # fmt: skip


def stability(old: Cells, new: Cells) -> tuple[float, float]:
    """(PSI, what it is on average between two samples of one distribution: (cells - 1)(1/n + 1/m)).

    PSI = sum over cells of (q - p) ln(q / p) with p and q the shares of the cell.
    """
    before, after = coarse(old), coarse(new)
    cells = before.keys() | after.keys()
    totals = [sum(side.values()) + PSEUDO_COUNT * len(cells) for side in (before, after)]
    index = 0.0
    for cell in sorted(cells):
        p, q = ((side.get(cell, 0) + PSEUDO_COUNT) / total for side, total in zip((before, after), totals, strict=True))
        index += (q - p) * math.log(q / p)
    return index, (len(cells) - 1) * (1 / sum(before.values()) + 1 / sum(after.values()))


def coarse(cells: Cells) -> dict[tuple[int, int], int]:
    merged: dict[tuple[int, int], int] = {}
    for prompt, output, requests in cells:
        octave = (prompt // BINS_PER_OCTAVE, output // BINS_PER_OCTAVE)
        merged[octave] = merged.get(octave, 0) + requests
    return merged
