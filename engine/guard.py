"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import signal

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def die_with_parent() -> None:
    """SIGKILL for the calling process as soon as the thread that spawned it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
