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
from tideforge.engine.ward import Ward
from tideforge.errors import CandidateError, IncumbentLost
from tideforge.tasks.verify.idle import Idle
from tideforge.tasks.verify.trialled import Trialled

PAIRS = 6  # of blocks
ROUNDS = 3  # of pairs that must all show a harm: each errs with 2.5 % at most
T999 = 5.893  # one-sided 99.9 % quantile of Student's t for PAIRS - 1 degrees of freedom
WORTH = math.log(1.02)  # a harm below this is not looked for, however little the blocks differ


def incumbent_unharmed(trialled: Trialled) -> dict[str, Any]:
    """Ends the candidate's worker."""
    limit = max(WORTH, measure.noise_of(trialled.noise)[1])
    for _ in range(ROUNDS):
        pairs = [trialled.clocked(lambda: _pair(trialled)) for _ in range(PAIRS)]
        _require_idle(trialled.idle)
        found = measure.interval([beside / frozen for beside, frozen in pairs])
        if not math.log(max(found.low, 1e-9)) > limit:
            break
    else:
        raise harmed("while the candidate is frozen", found.ratio, found.low, limit)
    figures = {"harm": found.ratio, "harm_low": found.low, "bound": math.exp(limit), "cpu_s": trialled.idle.busy_s}
    trialled.lab.release(trialled.b)
    if trialled.settings.device == "cpu":
        return figures
    ended = until_its_end([beside for beside, _ in pairs], [_seconds(trialled) for _ in range(PAIRS)], limit)
    return {**figures, "harm_until_its_end": ended}


def _require_idle(idle: Idle) -> None:
    if idle.busy_s > idle.allowed_s:
        raise Caught(
            f"the candidate's worker took {idle.busy_s:.3g} s of processor time in the {idle.watched_s:.3g} s in which the "
            f"incumbent was timed; expected 0, bound {idle.allowed_s:.3g} s"
        )


def until_its_end(beside: Sequence[float], after: Sequence[float], limit: float) -> float:
    """How many times as long the incumbent's blocks took before the worker's end. Raises Caught when that is beyond doubt."""
    logs = [[math.log(seconds) for seconds in times] for times in (beside, after)]
    mean = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    error = math.hypot(*(statistics.stdev(times) / math.sqrt(len(times)) for times in logs))
    if mean - T999 * error > limit:
        raise harmed("after the candidate's worker has ended", math.exp(mean), math.exp(mean - T999 * error), limit)
    return math.exp(mean)


def harmed(when: str, ratio: float, low: float, limit: float) -> Caught:
    return Caught(
        f"the incumbent is {ratio:.3f} times as fast {when}, at least {low:.3f} times; expected 1, bound {math.exp(limit):.3f}"
    )


def _pair(trialled: Trialled) -> tuple[float, float]:
    """Seconds of the incumbent's block beside the candidate and beside the frozen one, each after a block of the candidate's."""
    found: dict[bool, float] = {}
    first = bool(secrets.randbelow(2))
    replay = trialled.replay(trialled.workload.search)
    for frozen in (first, not first):
        replay(trialled.candidate.id, trialled.b)
        with _frozen(trialled.b.ward) if frozen else trialled.idle.watching(trialled.b.ward):
            found[frozen] = replay(trialled.incumbent.id, trialled.a).seconds
    return found[False], found[True]


def _seconds(trialled: Trialled) -> float:
    """Of the incumbent alone."""
    with trialled.lab.clock():
        try:
            return trialled.replay(trialled.workload.search)(trialled.incumbent.id, trialled.a).seconds
        except CandidateError as error:
            raise IncumbentLost(f"the incumbent's worker failed alone: {error.message}") from error


@contextlib.contextmanager
def _frozen(ward: Ward) -> Iterator[None]:
    """Stops a worker and what it started meanwhile."""
    stopped = procfs.below(ward.warden_pid)
    _signal(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
