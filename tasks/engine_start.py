"""Starts the process of an engine and waits until its incumbent is up and tuned; what it ended with, where it did not get that far."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from pathlib import Path

from tideforge.data.files import disk_full
from tideforge.engine import procfs
from tideforge.engine.claim import holder
from tideforge.engine.client import LOCK, SOCKET, EngineClient
from tideforge.engine.guard import exit_code, has_ended, start_detached
from tideforge.errors import TideforgeError, Told, UserError
from tideforge.tasks.machine import other_cpus

LEAST_FREE = 1 << 16  # bytes without which a service cannot even say what it lacks


def start_service(state: Path, folder: Path) -> None:
    """Starts the engine of `folder/service.json` and waits until it is ready. Whatever ends this early, Ctrl-C too, ends the engine.

    UserError where it ended because of something that the user can mend.
    """
    log = folder / "service.log"
    known = log.stat().st_size if log.exists() else 0
    supervisor = launch(folder)
    try:
        await_ready(state, supervisor, log, known)
    except BaseException:
        own = procfs.below(supervisor)
        procfs.kill([supervisor], signal.SIGTERM)
        while not has_ended(supervisor) or holder(state / LOCK) in own:
            time.sleep(0.05)
        raise


def launch(folder: Path) -> int:
    """Starts the engine of `folder/service.json`, log beside it; the supervisor's pid."""
    cpus = ",".join(map(str, other_cpus()))
    command = [
        sys.executable, "-m", "tideforge.engine.supervise", "--config", str((folder / "service.json").resolve()),
        "--cpus", cpus,
    ]  # fmt: skip
    return start_detached(command, folder / "service.log")


def await_ready(state: Path, supervisor: int, log: Path, known: int) -> None:
    """`known`: bytes of the log that are of earlier starts."""
    while True:
        if (code := exit_code(supervisor)) is not None:
            said = log.read_bytes()[known:] if log.exists() else b""
            raise ended_early(code, said.decode(errors="replace").splitlines(), log)
        with contextlib.suppress(UserError):
            if EngineClient(state / SOCKET, patience_s=0).queue().ready:
                return
        time.sleep(0.1)


def ended_early(code: int, lines: list[str], log: Path) -> TideforgeError:
    """What the user is told of a service that has ended before it was ready."""
    if code == 2 and lines:
        return Told(lines[-1])
    if shutil.disk_usage(log.parent).free < LEAST_FREE:
        return disk_full(log.parent)
    return TideforgeError(f"the engine ended while starting ({lines[-1] if lines else 'no word'}); read {log}")
