"""The outer half of the workers' sandbox: bubblewrap around the nursery, so around everything that it forks (confine.py: inside).

What a nursery needs is bound into an empty root, read-only; all else of the machine is not there: home directories, run
folders, sockets, archive, keys. No network, processes and IPC of its own, and the user is nobody.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tideforge
from tideforge.errors import UserError

REQUIRE, PREFER, OFF = "require", "prefer", "off"
NOBODY = "65534"
TRY_S = 60.0
NONE = "none"
BWRAP = "bwrap"
# The warden's, over the sandbox only. It mounts a worker's folders, and the worker drops them.
CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETPCAP", "CAP_SYS_RESOURCE")
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("alternatives", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "passwd")
DEVICES = ("null", "zero", "full", "random", "urandom")
GPU = ("/dev/nvidia*",)
SYSTEM = {"cpu": "/sys/devices/system", "gpu": "/sys"}


@dataclasses.dataclass(frozen=True)
class Places:
    """What workers of one lab need of the file system; all absolute."""

    state: Path  # hidden but for these three below it
    scratch: Path  # of all workers; each sees its own only
    logs: Path  # the warden's
    forwards: Path
    model: Path


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """`words` go in front of a nursery's command. Without them workers are plain processes, and `why` says why."""

    words: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()  # of what the nursery sees, what its workers do not
    why: str = ""

    @property
    def on(self) -> bool:
        return bool(self.words)

    def __str__(self) -> str:
        """As figures record it."""
        return BWRAP if self.on else f"{NONE}: {self.why}"


PLAIN = Sandbox(why="not asked for")


def sandbox_for(mode: str, places: Places, device: str, environment: Mapping[str, str]) -> Sandbox:
    """The sandbox of a lab's workers, tried once with a process that does what a worker will do.

    `mode`: "require" (UserError where there is none), "prefer" (plain processes then) or "off".
    """
    if mode == OFF:
        return Sandbox(why="off in the endpoint file")
    for folder in (places.scratch, places.logs, places.forwards):
        folder.mkdir(parents=True, exist_ok=True)
    found = shutil.which(BWRAP)
    problem = "bubblewrap is not on PATH"
    if found is not None:
        if device != "cpu":
            make_device_files()
        words = (found, *arguments(places, device, environment))
        problem = _refusal(words, places, device, environment)
        if not problem:
            return Sandbox(words, (str(places.logs),))
    if mode == REQUIRE:
        raise required(problem)
    return Sandbox(why=problem)


def required(problem: str) -> UserError:
    remedy = (
        "install Debian's bubblewrap and allow user namespaces, or set `sandbox: prefer` and accept plain processes"
    )
    return UserError("sandbox: require", f"workers cannot have one here ({problem})", remedy)


def make_device_files() -> None:
    """The driver makes some of them only when it is first used, and nothing in a sandbox can."""
    if not os.path.exists("/dev/nvidia-uvm") and (maker := shutil.which("nvidia-modprobe")):
        subprocess.run([maker, "-u", "-c", "0"], stdin=subprocess.DEVNULL, capture_output=True)


def _refusal(words: tuple[str, ...], places: Places, device: str, environment: Mapping[str, str]) -> str:
    """What the sandbox could not give to a worker, "" when it gave everything."""
    command = [*words, sys.executable, "-P", "-m", "tideforge.engine.confine", str(places.scratch)]
    command += ["--cuda"] if device != "cpu" else []
    command += ["--read", str(places.model / "config.json")]
    try:
        done = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRY_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"bubblewrap ended with code {done.returncode}"


def arguments(places: Places, device: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Bubblewrap's, up to the command. It must outlive neither less nor more than its nursery's wardens do, whose sockets end
    them; so nothing here ties it to a thread of the authority."""
    yield from ("--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--hostname", "worker", "--cap-drop", "ALL")
    for namespace in ("pid", "net", "ipc", "uts"):
        yield f"--unshare-{namespace}"
    for capability in CAPABILITIES:
        yield from ("--cap-add", capability)
    yield from ("--proc", "/proc", "--tmpfs", "/tmp", "--dir", "/dev/shm", "--chdir", "/")
    yield from _devices(device)
    readable = _outermost(_readable(places, device, environment))
    below = [path for path in readable if path.is_relative_to(places.state)]
    for path in readable:
        if path not in below:
            yield from _bound(path)
    yield from ("--tmpfs", str(places.state))
    for path in (*below, places.forwards):
        yield from _bound(path)
    for path in (places.scratch, places.logs):
        yield from ("--bind", str(path), str(path))
    for path in (places.state, Path("/tmp"), Path("/dev"), Path("/")):
        yield from ("--remount-ro", str(path))
    yield "--"


def _devices(device: str) -> Iterator[str]:
    """No terminals: a devptsfs would be one for all workers, and make bubblewrap nest user namespaces."""
    names = [f"/dev/{name}" for name in DEVICES]
    if device != "cpu":
        names += sorted(name for pattern in GPU for name in glob.glob(pattern))
    yield from ("--tmpfs", "/dev", "--dir", "/dev/shm")
    for name in names:
        yield from ("--dev-bind", name, name)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        yield from ("--symlink", f"/proc/self/fd{target}", f"/dev/{name}")


def _readable(places: Places, device: str, environment: Mapping[str, str]) -> Iterator[Path]:
    yield from map(Path, PROGRAMS)
    yield from (Path("/etc", name) for name in ETC)
    yield Path(SYSTEM["cpu" if device == "cpu" else "gpu"])
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix}:
        yield from (Path(prefix), Path(prefix).resolve())
    yield from (Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))
    package = Path(tideforge.__file__).parent
    yield from (package, *{part.resolve() for part in package.iterdir()})
    named = (*environment.get("PYTHONPATH", "").split(os.pathsep), *environment.get("LD_LIBRARY_PATH", "").split(":"))
    yield from (
        Path(entry).absolute() for entry in named if entry and not package.is_relative_to(Path(entry).absolute())
    )
    yield from (places.model, (places.model / "config.json").resolve())


def _outermost(paths: Iterator[Path]) -> list[Path]:
    """Those that exist and lie in no other, the shallow ones first."""
    kept: list[Path] = []
    for path in sorted({path for path in paths if path.exists()}, key=lambda path: (len(path.parts), path)):
        if not any(path.is_relative_to(other) for other in kept if not other.is_symlink()):
            kept.append(path)
    return kept


def _bound(path: Path) -> tuple[str, ...]:
    if path.is_symlink() and len(path.parts) == 2:  # /bin to usr/bin
        return ("--symlink", os.readlink(path), str(path))
    return ("--ro-bind", str(path), str(path))
