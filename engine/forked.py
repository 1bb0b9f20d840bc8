"""What a forked process does by hand because no exec does it: a program's end, environment, descriptors, signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn


def run_as_program(work: Callable[[], None]) -> NoReturn:
    """Runs `work` and ends the process with the code that an interpreter would give. It never returns to the frames above:
    what their `finally` and atexit do is the parent's business."""
    code = 1
    try:
        code = exit_code(work)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def exit_code(work: Callable[[], None]) -> int:
    """What an interpreter would end with whose main program is `work`; an error is printed as it would be."""
    try:
        work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def reset_signals() -> None:
    """As a new interpreter has them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def close_all_but(kept: Collection[int]) -> None:
    """Closes every descriptor of the process by its number, so that no inherited object can reach what it was."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def take_over(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """From now on the process is `python -P -m module ...` with this environment, for itself and in /proc."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may have been asked for before
    sys.argv[:] = [module, *arguments]
    show([sys.executable, "-P", "-m", *sys.argv], [f"{name}={value}" for name, value in environment.items()])


def show(arguments: Sequence[str], environment: Sequence[str]) -> None:
    """Writes over the strings that the process got at its exec, which ps and procfs.marked read; cut to their room.

    proc_pid_stat(5), fields 48 to 51. Nothing else may point there any more: see `take_over`.
    """
    with open("/proc/self/stat") as file:
        edges = [int(field) for field in file.read().rpartition(")")[2].split()[45:49]]
    _overwrite(edges[0], edges[1], arguments)
    _overwrite(edges[2], edges[3], environment)


def _overwrite(start: int, end: int, strings: Sequence[str]) -> None:
    text = os.fsencode("".join(f"{one}\0" for one in strings))
    if end > start > 0:
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)
