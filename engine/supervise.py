"""Starts the service and starts it again when it is killed: the archive on disk lets it go on. Ends when it ends by itself.

Told to end (SIGTERM) it ends the service at once. If no service of it has been ready by then, what they started goes too: a failed
start leaves no keeper behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tideforge.engine import procfs
from tideforge.engine.events import log_event, read_events
from tideforge.engine.guard import adopt_orphans, die_with_parent, reaped
from tideforge.engine.service_config import ServiceConfig

MAX_RESTARTS = 10
PAUSE_S = 0.5


def supervise(config_path: Path) -> int:
    """The service's exit code once it ended by itself, or before it was ready; 70 when it died more than MAX_RESTARTS times."""
    config = ServiceConfig.read(config_path)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    before = readied(config)
    try:
        return _restarted(config, config_path)
    finally:
        if readied(config) == before:
            procfs.kill(procfs.descendants(os.getpid()))


def _restarted(config: ServiceConfig, config_path: Path) -> int:
    command = [sys.executable, "-m", "tideforge.engine.service", "--config", str(config_path)]
    for _ in range(MAX_RESTARTS + 1):
        ready = readied(config)
        with (config.night / "service.log").open("ab") as log:
            service = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        code = reaped(service)
        if code == 0 or (code > 0 and readied(config) == ready):
            return code
        why = {"signal": signal.Signals(-code).name} if code < 0 else {"code": code}
        log_event(config.night, "service_died", **why)
        time.sleep(PAUSE_S)
    return 70


def readied(config: ServiceConfig) -> int:
    return sum(event["event"] == "service_ready" for event in read_events(config.night))


def main() -> None:
    parser = argparse.ArgumentParser(description="keep the engine's service alive for a night")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--cpus", default="", help="cores for everything but measuring workers, e.g. 0,1")
    args = parser.parse_args()
    if args.cpus:
        os.sched_setaffinity(0, {int(core) for core in args.cpus.split(",")})
    sys.exit(supervise(args.config))


if __name__ == "__main__":
    main()
