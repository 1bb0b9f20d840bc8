"""An endpoint's keepers as others see them: found by their sockets, started, asked what they hold, ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tideforge.engine import procfs, protocol, sockets
from tideforge.engine.config import Settings
from tideforge.engine.guard import exit_code, start_detached
from tideforge.engine.weights import fingerprint
from tideforge.errors import PeerGone, ProtocolError, Told, UserError

START_TIMEOUT_S = 120.0
LEAVING_S = 2.0  # for whoever has just ended to be gone from the keeper's book
LANE = "lane"  # lane-1, lane-2: state folders of an endpoint's further devices


def connect_keeper(settings: Settings) -> socket.socket:
    """A connection to the endpoint's keeper, which is started when none runs.

    One that holds another model, the files of this one as they were, or another precision is ended first; UserError where somebody
    uses it.
    """
    path = settings.state / "keeper.sock"
    with keeper_lock(settings.state):
        if (status := keeper_status(settings.state)) is not None and (problem := unlike(status, settings)):
            end_unused(settings.state, status, problem)
        return _connect(path) or _start_keeper(settings, path)


@contextlib.contextmanager
def keeper_lock(state: Path) -> Iterator[None]:
    """Nobody starts to use a keeper of `state` meanwhile."""
    with (state / "keeper.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unlike(status: dict[str, Any], settings: Settings) -> str:
    """What a keeper holds instead of what the settings ask for; "" where it holds that."""
    held = (Path(status["model"]), status["dtype"], status["device"])
    if held != (settings.model.resolve(), settings.dtype, settings.device):
        return f"its keeper holds {held[0]} as {held[1]} on {held[2]}"
    return "" if status.get("fingerprint") == fingerprint(settings.model) else f"its keeper holds {held[0]} as it was"


def end_unused(state: Path, status: dict[str, Any], problem: str) -> None:
    """Ends the keeper and waits until it has gone. Under keeper_lock. UserError with `problem` where somebody uses it."""
    deadline = time.monotonic() + LEAVING_S
    while status.get("users", 2) > 1:  # one is whoever asks
        if time.monotonic() > deadline:
            remedy = "stop what uses it first (tideforge engine stop, tideforge down), or take another state folder"
            raise UserError(str(state / "keeper.sock"), problem, remedy)
        time.sleep(0.05)
        if (now := keeper_status(state)) is None:
            break
        status = now
    procfs.kill([int(status["pid"])], signal.SIGTERM)
    while (
        sock := _connect(state / "keeper.sock")
    ) is not None:  # its threads end one by one, the last one closes the socket
        sock.close()
        time.sleep(0.02)


def _connect(path: Path) -> socket.socket | None:
    try:
        return sockets.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return None


def _start_keeper(settings: Settings, path: Path) -> socket.socket:
    log = settings.state / "logs" / "keeper.log"
    command = [
        sys.executable, "-m", "tideforge.engine.keeper", "--model", str(settings.model.resolve()),
        "--dtype", settings.dtype, "--device", settings.device, "--state", str(settings.state.resolve()),
    ]  # fmt: skip
    pid = start_detached(command, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (sock := _connect(path)) is not None:
            return sock
        if (code := exit_code(pid)) is not None:
            if code == 2:
                raise Told(log.read_text(errors="replace").splitlines()[-1])
            raise ProtocolError(f"the keeper ended while starting; see {log}")
        time.sleep(0.05)
    raise ProtocolError(f"the keeper was not ready within {START_TIMEOUT_S:g} s; see {log}")


def keeper_status(state: Path) -> dict[str, Any] | None:
    """What the running keeper says of itself, or None when none runs, or one that is just ending."""
    sock = _connect(state / "keeper.sock")
    if sock is None:
        return None
    with sock, contextlib.suppress(PeerGone):
        return protocol.call(sock, {"type": "status"}, 10).header
    return None


def retire_keepers(state: Path) -> int:
    """Ends the keepers of a state folder that run; how many. UserError where somebody uses one."""
    ended = 0
    for folder in keeper_folders(state):
        if keeper_status(folder) is None:
            continue
        with keeper_lock(folder):
            if (status := keeper_status(folder)) is not None:
                end_unused(folder, status, "its keeper is used")
                ended += 1
    return ended


def keeper_folders(state: Path) -> list[Path]:
    """Where keepers of an endpoint may run: its state folder, and below it one for each further device."""
    return [state, *sorted(state.glob(f"{LANE}-*"))]


def end_keeper(state: Path) -> None:
    """Ends the keepers of a state folder that run, and with them weights and pages."""
    for folder in keeper_folders(state):
        if (status := keeper_status(folder)) is not None:
            os.kill(status["pid"], signal.SIGTERM)
