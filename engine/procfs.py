"""What Linux says of processes: who descends from whom, how many threads, how much memory, how much was written.

Standard library only. A process that has ended meanwhile counts as nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

PROC = "/proc"
_CLOCK_OF_PROCESS = 2  # Linux, CPUCLOCK_SCHED: what clock_getcpuclockid(3) makes of a process id
_TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except _GONE:
        return ""


def _fields(path: str, names: tuple[str, ...]) -> int:
    """Sum of the numbers that stand behind these names, one "name: number" a line."""
    found = (line.split(":", 1) for line in _text(path).splitlines() if line.startswith(names))
    return sum(int(value.split()[0]) for _, value in found)


def processes() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def descendants(pid: int) -> list[int]:
    """Children of `pid`, their children, and so on; zombies are left out, what descends from them is not."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for one in processes():
        fields = _text(f"{PROC}/{one}/stat").rpartition(")")[2].split()
        if fields:
            children.setdefault(int(fields[1]), []).append(one)
            if fields[0] in "ZX":
                zombies.add(one)
    found, todo = [], [pid]
    while todo:
        todo += (below := children.get(todo.pop(), []))
        found += below
    return [one for one in found if one not in zombies]


def below(pid: int) -> list[int]:
    """Like `descendants`, zombies included, and as cheap as there are few of them; needs a kernel that lists children."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        with contextlib.suppress(*_GONE):
            for thread in os.listdir(f"{PROC}/{one}/task"):
                children = [int(word) for word in _text(f"{PROC}/{one}/task/{thread}/children").split()]
                found += children
                todo += children
    return found


def runs(pid: int) -> bool:
    """Whether the process is there; not a zombie."""
    return _text(f"{PROC}/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def cpu_seconds(pid: int) -> float:
    """Of all its threads, ended ones too, to the nanosecond; of children that it waited for, to a tick. 0 when it is gone."""
    fields = _text(f"{PROC}/{pid}/stat").rpartition(")")[2].split()
    try:
        own = time.clock_gettime((~pid << 3) | _CLOCK_OF_PROCESS)
    except OSError:
        own = 0.0
    return own + (sum(map(int, fields[13:15])) / _TICKS if fields else 0.0)


def tasks_in_all() -> int:
    """Threads of the whole machine: a cheap hint that something forks."""
    return int(_text(f"{PROC}/loadavg").split()[3].partition("/")[2])


def descends(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` started `pid`, or started what did."""
    while pid > 1:
        fields = _text(f"{PROC}/{pid}/stat").rpartition(")")[2].split()
        pid = int(fields[1]) if fields else 0
        if pid == ancestor:
            return True
    return False


def threads(pid: int, driver: str = "") -> int:
    """Of a process; those whose name begins with `driver`, if that is given, do not count."""
    try:
        names = [_name(f"{PROC}/{pid}/task/{thread}/comm") for thread in os.listdir(f"{PROC}/{pid}/task")]
    except _GONE:
        return 0
    return sum(not (driver and name.startswith(driver)) for name in names)


def _name(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except _GONE:
        return ""


def memory_bytes(pid: int) -> int:
    """Resident memory of its own and shared memory that it maps; not the pages of files."""
    return 1024 * _fields(f"{PROC}/{pid}/status", ("RssAnon:", "RssShmem:"))


def share_bytes(pid: int) -> int:
    """Like `memory_bytes`, but of pages that several processes hold only its share. Takes the kernel a millisecond."""
    return 1024 * _fields(f"{PROC}/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))


def smaps(pid: int) -> str:
    """All that its mappings hold, one by one; "" where the kernel refuses that."""
    return _text(f"{PROC}/{pid}/smaps")


def listed(folder: str) -> list[str]:
    """Paths of what is in it; [] where it cannot be read."""
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def status(path: str, follow: bool = False) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError:
        return None


def written_bytes(pid: int) -> int:
    """What it and the children that it has waited for wrote: by calls, or through mapped files, whichever is more."""
    path = f"{PROC}/{pid}/io"
    return max(_fields(path, ("wchar:",)), _fields(path, ("write_bytes:",)))


def kills_by_the_kernel() -> int:
    """How often the kernel has killed a process for want of memory since it started."""
    for line in _text(f"{PROC}/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return 1024 * _fields(f"{PROC}/meminfo", ("MemAvailable:",))


def total_bytes() -> int:
    """Memory of the machine."""
    return 1024 * _fields(f"{PROC}/meminfo", ("MemTotal:",))


def mapping_of(pid: int, address: int) -> str:
    """The name of the mapping that holds `address`, "" when there is none or it has no name."""
    for line in _text(f"{PROC}/{pid}/maps").splitlines():
        parts = line.split(maxsplit=5)
        low, high = (int(edge, 16) for edge in parts[0].split("-"))
        if low <= address < high:
            return parts[5] if len(parts) > 5 else ""
    return ""


def marked(marker: str) -> list[int]:
    """Processes of this user whose environment at their start holds `marker`."""
    return [pid for pid in processes() if marker in _text(f"{PROC}/{pid}/environ")]


def marks(name: str) -> set[str]:
    """What this variable was at the start of any process of this user."""
    found = (entry.partition("=") for pid in processes() for entry in _text(f"{PROC}/{pid}/environ").split("\0"))
    return {value for key, _, value in found if key == name}


def kill(pids: Iterable[int], number: int = 9) -> None:
    for pid in pids:
        with contextlib.suppress(*_GONE):
            os.kill(pid, number)
