"""From scores to alarms: hysteresis and cool-down, and thresholds that give an asked number of false alarms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RELEASE = 0.8  # of the threshold: an alarm lasts until the score is below
COOLDOWN_HOURS = 12  # after an alarm's end; what comes within belongs to it


def alarms(ratio: Floats) -> list[int]:
    """Hours in which an alarm begins; `ratio` [hours] is a score over its threshold."""
    begun: list[int] = []
    quiet_since = -COOLDOWN_HOURS  # the hour after the last alarm's end
    on = False
    for hour in np.flatnonzero((ratio >= RELEASE) | (np.roll(ratio, 1) >= RELEASE)):
        if on and ratio[hour] < RELEASE:
            on, quiet_since = False, int(hour)
        elif not on and ratio[hour] >= 1:
            if hour - quiet_since >= COOLDOWN_HOURS:
                begun.append(int(hour))
            on = True
    return begun


def limits_for(runs: Sequence[Floats], wanted: float) -> Floats:
    """Thresholds [families] for calm `runs` (scores [hours, families]): at most `wanted` alarms a run, all together.

    Each family's is the same quantile of its largest score a run, the lowest that keeps to `wanted`.
    """
    tops = np.array([run.max(axis=0) for run in runs])
    limits = np.maximum(tops.max(axis=0) * 1.001, 1e-9)
    for level in np.arange(0.995, 0.5, -0.005):
        tried = np.maximum(np.quantile(tops, level, axis=0), 1e-9)
        if np.mean([len(alarms((run / tried).max(axis=1))) for run in runs]) > wanted:
            break
        limits = tried
    return np.asarray(limits)
