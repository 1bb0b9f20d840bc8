"""Processes that must not outlive the one that started them, and processes that must."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Linux, prctl(2)
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000  # Linux, clone(2)


def die_with_parent() -> None:
    """SIGKILL for the calling process as soon as the thread that spawned it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def signal_with_parent(number: int) -> None:
    """Like die_with_parent, with a signal that can be caught."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def start_detached(command: Sequence[str], log: Path) -> int:
    """Starts a process in a session of its own that outlives this one; its pid. Output goes to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(command[0], list(command), dict(os.environ), file_actions=actions, setsid=True)


def exit_code(pid: int) -> int | None:
    """Of a process started here that has ended, which is reaped: negative for a signal, 255 if somebody else reaped it."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 255
    return os.waitstatus_to_exitcode(status) if ended == pid else None


def has_ended(pid: int) -> bool:
    """Whether a process started here has ended (and reaps it)."""
    return exit_code(pid) is not None


def reaped(process: subprocess.Popen[bytes]) -> int:
    """Waits for the process, and meanwhile for whatever orphan the calling process has adopted; the process's exit code."""
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def adopt_orphans() -> None:
    """What loses its parent below the calling process becomes its child, whatever session it is in."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def enter_pid_namespace() -> bool:
    """Whether the children that the calling process starts from now on live in a process namespace of their own, which
    ends with its first member. Needs root, or a kernel that lets users make namespaces; single-threaded callers only."""
    if _LIBC.unshare(_CLONE_NEWPID) == 0:
        return True
    user, group = os.geteuid(), os.getegid()
    if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWPID) != 0:
        return False
    for name, text in (("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    return True


def limit_data(more_bytes: int) -> None:
    """Private memory of the calling process may grow by so much from now on; what is over fails to be allocated."""
    with open("/proc/self/status") as file:
        now = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + more_bytes, now + more_bytes))
