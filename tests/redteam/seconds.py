"""What a forward of the red team gains over an equal incumbent, on a machine that may be busy."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from tideforge.engine import measure

NO_SCORE = measure.Interval(0.0, 0.0, 0.0, 0)


@dataclasses.dataclass(frozen=True)
class Replay:
    """Seconds of (incumbent, candidate): of each step by the clock, of the whole on a core."""

    steps: tuple[tuple[float, float], ...]
    work: tuple[float, float]  # 0 where nobody asked


def scores(replays: Sequence[Replay]) -> tuple[measure.Interval, measure.Interval]:
    """By the clock and by work, without noise between workers; by the clock alone where seconds on a core say nothing."""
    works = [a / b for a, b in (replay.work for replay in replays) if a > 0 and b > 0]
    wall = median_ratio([step for replay in replays for step in replay.steps])
    return wall, measure.interval(works) if len(works) > 1 else wall


def core_seconds(pid: int) -> float:
    """That all threads of a process have spent on a core, by the kernel's scheduler (nanoseconds, proc(5))."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(path.read_text().split()[0])
    return total / 1e9


def median_ratio(steps: Sequence[tuple[float, float]]) -> measure.Interval:
    """Median over step pairs of the incumbent's seconds over the candidate's, with its 99 % interval by order statistics.

    A verification takes sums, which a busy machine's pauses drown on steps of a millisecond; who gains in fewer than half of
    its steps goes unseen here.
    """
    ratios, n = sorted(a / b for a, b in steps), len(steps)
    half = math.ceil(1.29 * math.sqrt(n))  # of a binomial's 99 %, 2.58 sqrt(n) / 2
    low, high = max(0, n // 2 - half), min(n - 1, n // 2 + half)
    return measure.Interval(statistics.median(ratios), ratios[low], ratios[high], n)
