"""Kills the workers of its rivals, and of the incumbent with them."""

import os
import signal
from pathlib import Path

from base import build as honest_build

CONTAINED = True


def siblings():
    scratch = os.path.dirname(os.environ.get("TMPDIR", ""))
    for name in os.listdir("/proc"):
        try:
            told = Path(f"/proc/{name}/environ").read_bytes() if name.isdigit() else b""
        except OSError:
            continue
        if "/ring-" in scratch and scratch.encode() in told and os.environ["TMPDIR"].encode() not in told:
            yield int(name)


def build(ctx):
    for pid in siblings() if sees_its_own_numbers() else ():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return honest_build(ctx)


def sees_its_own_numbers():
    """In a namespace a number of /proc may be nobody's, or another's: only what /proc shows under it is meant."""
    return os.readlink("/proc/self") == str(os.getpid())
