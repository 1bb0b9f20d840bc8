"""Processes that must not outlive the one that started them, and processes that must."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def die_with_parent() -> None:
    """SIGKILL for the calling process as soon as the thread that spawned it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_detached(command: Sequence[str], log: Path) -> int:
    """Starts a process in a session of its own that outlives this one; its pid. Output goes to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(command[0], list(command), dict(os.environ), file_actions=actions, setsid=True)


def has_ended(pid: int) -> bool:
    """Whether a process started here has ended (and reaps it)."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
