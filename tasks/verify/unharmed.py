"""Gate: the incumbent is as fast beside the candidate as without it, and the candidate rests while the incumbent is timed.

The candidate is frozen (SIGSTOP, and whatever it started) in every second block, in random order, so that a machine's drift
weighs on both alike. On a GPU, where work may be left running that no signal stops, blocks after the worker's end count too.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tideforge.engine import measure, procfs
from tideforge.engine.gates.caught import Caught
from tideforge.tasks.verify.trialled import Trialled

PAIRS = 6  # of blocks
WORTH = math.log(1.02)  # a harm below this is not looked for, however little the blocks differ


def incumbent_unharmed(trialled: Trialled) -> dict[str, Any]:
    """Ends the candidate's worker."""
    trialled.revive()
    pairs = [_pair(trialled) for _ in range(PAIRS)]
    idle = trialled.idle
    if idle.busy_s > idle.allowed_s:
        raise Caught(
            f"the candidate's worker took {idle.busy_s:.3g} s of processor time in the {idle.watched_s:.3g} s in which the "
            f"incumbent was timed; expected 0, bound {idle.allowed_s:.3g} s"
        )
    limit = max(WORTH, measure.noise_of(trialled.noise)[1])
    gain = [math.log(beside / frozen) for beside, frozen in pairs]  # in seconds: above 0 where it harms
    _require_unharmed("while it is frozen", gain, limit)
    figures = {"harm": math.exp(statistics.fmean(gain)), "bound": math.exp(limit), "cpu_s": idle.busy_s}
    trialled.lab.release(trialled.b)
    if trialled.settings.device == "cpu":
        return figures
    alone = [_seconds(trialled) for _ in range(PAIRS)]
    ended = [math.log(beside / after) for (beside, _), after in zip(pairs, alone, strict=True)]
    _require_unharmed("after its worker's end", ended, limit)
    return {**figures, "harm_until_its_end": math.exp(statistics.fmean(ended))}


def _require_unharmed(when: str, gain: Sequence[float], limit: float) -> None:
    """`gain`: log ratios of the incumbent's seconds. Their 95 % interval must not lie beyond the limit."""
    found = measure.interval([math.exp(one) for one in gain])
    if math.log(max(found.low, 1e-9)) > limit:
        raise Caught(
            f"the incumbent is {found.ratio:.3f} times [{found.low:.3f}, {found.high:.3f}] as fast {when}; "
            f"expected 1, bound {math.exp(limit):.3f}"
        )


def _pair(trialled: Trialled) -> tuple[float, float]:
    """Seconds of the incumbent's block beside the candidate and beside the frozen one, each after a block of the candidate's."""
    found: dict[bool, float] = {}
    first = bool(secrets.randbelow(2))
    replay = trialled.replay(trialled.workload.search)
    with trialled.lab.clock():
        for frozen in (first, not first):
            replay(trialled.candidate.id, trialled.b)
            with _frozen(trialled.b.pid) if frozen else trialled.idle.watching(trialled.b.pid):
                found[frozen] = replay(trialled.incumbent.id, trialled.a).seconds
    return found[False], found[True]


def _seconds(trialled: Trialled) -> float:
    with trialled.lab.clock():
        return trialled.replay(trialled.workload.search)(trialled.incumbent.id, trialled.a).seconds


@contextlib.contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """Stops a process and its descendants meanwhile."""
    stopped = [pid, *procfs.descendants(pid)]
    _signal(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
