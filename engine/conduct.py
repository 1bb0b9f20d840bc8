"""What a candidate may have done beside answering rightly: left threads or processes, tried to write the weights, grown.

All of it is read by the authority from the kernel; nothing is asked of the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from tideforge.engine.ward import Census
from tideforge.errors import CandidateError

GROWN_BYTES = 48 << 20  # over a trial's later steps, more than the incumbent: allocators settle within less
GROWN_DEVICE_BYTES = 512 << 20
MIN_READINGS = 8


def require_decent(before: Census, after: Census, threads: int) -> None:
    """`before`: the worker as a spare; `threads`: what the engine allows a forward. Raises CandidateError."""
    if after.weights_faults > before.weights_faults:
        raise CandidateError("weights_written", "a store into the weights was refused and survived")
    if after.processes > before.processes:
        left = after.processes - before.processes
        raise CandidateError("left_processes", f"{left} processes of its own still ran after the last step")
    allowed = before.threads + threads - 1
    if after.threads > allowed:
        raise CandidateError(
            "left_threads", f"{after.threads} threads still ran after the last step; {allowed} are the engine's"
        )


def require_steady(readings: Sequence[int], incumbent: Sequence[int]) -> None:
    """Resident bytes after each step, of candidate and incumbent. Raises CandidateError("memory_grew")."""
    if len(readings) < MIN_READINGS:
        return
    grown, usual = growth(readings), growth(incumbent)
    if grown > max(0, usual) + GROWN_BYTES:
        raise CandidateError(
            "memory_grew",
            f"it held {grown >> 20} MiB more in the last quarter of {len(readings)} steps than in the second; "
            f"the incumbent {max(0, usual) >> 20}",
        )


def require_steady_device(readings: Sequence[tuple[int, int]]) -> None:
    """Bytes on a GPU after each pass, of (incumbent, candidate). Raises CandidateError("memory_grew").

    More is allowed than on the host: torch keeps what the longest prompts so far needed, and later ones may be longer.
    """
    half = len(readings) // 2
    if half == 0:
        return
    usual, grown = (min(column[half:]) - max(column[:half]) for column in zip(*readings, strict=True))
    if grown > max(0, usual) + GROWN_DEVICE_BYTES:
        raise CandidateError(
            "memory_grew",
            f"it held {grown >> 20} MiB more of the GPU's memory in the later half of {len(readings)} passes; "
            f"the incumbent {max(0, usual) >> 20}",
        )


def growth(readings: Sequence[int]) -> int:
    """Least of the last quarter less most of the second: what comes and goes does not count."""
    quarter = len(readings) // 4
    if quarter == 0:
        return 0
    return min(readings[-quarter:]) - max(readings[quarter : 2 * quarter])
