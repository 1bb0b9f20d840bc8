"""Runs a command whose processes all end with the one that asked: `python -m tideforge.engine.tied PID COMMAND...`.

A benchmark's service starts a keeper that is made to outlive services. Here whatever loses its parent below the command becomes
this process's child, and goes when the command has ended, when this process is told to end, or when PID has, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tideforge.engine import procfs
from tideforge.engine.guard import adopt_orphans, die_with_parent, has_ended, reaped, signal_with_parent, start_detached


def start_tied(command: Sequence[str], log: Path) -> int:
    """Like start_detached, but nothing of it outlives the calling thread. SIGTERM to the pid ends all of it."""
    return start_detached([sys.executable, "-m", "tideforge.engine.tied", str(os.getpid()), *command], log)


def end_tied(pid: int) -> None:
    """Ends what start_tied has started, at once; nothing to do where it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    while not has_ended(pid):
        time.sleep(0.01)


def run(parent: int, command: Sequence[str]) -> int:
    """The command's exit code; 143 when it was ended."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal_with_parent(signal.SIGTERM)
    try:
        if os.getppid() != parent:  # it ended before we could ask to be told
            return 143
        code = reaped(subprocess.Popen(list(command), preexec_fn=die_with_parent))
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while pids := procfs.descendants(os.getpid()):
            procfs.kill(pids)
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
