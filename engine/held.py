"""What a worker holds, as kernel and driver count it from outside: nothing is asked of the worker.

On the host that is memory of its own and of what it started, and memory files: mapped, open or in its /dev/shm. A file that the
worker it is compared with maps too (libraries, the weights) does not count. Fields are those of proc(5), smaps.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping

from tideforge.engine import nvml, procfs
from tideforge.engine.ward import Ward

KEEPS = ("Anonymous", "Swap", "Private_Hugetlb", "Shared_Hugetlb")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)", re.MULTILINE)
_FIELD = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)
_BLOCK = 512  # bytes, stat(2)

File = tuple[int, int]  # device, inode


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes: of memory of its own, and in memory of each file."""

    own: int
    files: Mapping[File, int]

    def beyond(self, other: Held, given: Mapping[File, int]) -> int:
        """How much more than `other`. `given`: what it was handed, up to so many bytes of each."""
        files = (max(0, size - given.get(file, 0)) for file, size in self.files.items() if file not in other.files)
        return self.own - other.own + sum(files)


def file_of(fd: int) -> File:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def of_worker(ward: Ward, device: str) -> Held | None:
    """What a worker and all that it started hold, on a GPU of the GPUs' memory; None where that is not shown.

    The first process of its namespace is among them, which is alike in all.
    """
    if device != "cpu":
        found = nvml.device_bytes(ward.pid)
        return None if found is None else Held(found, {})
    return held([ward.pid, *(pid for pid in procfs.below(ward.warden_pid) if pid != ward.pid)])


def held(pids: Collection[int]) -> Held | None:
    """Of these processes together; None where the kernel shows nothing of the first, which has ended or hides itself."""
    own = 0
    files: dict[File, int] = {}
    for index, pid in enumerate(pids):
        text = procfs.smaps(pid)
        if not text and index == 0:
            return None
        mapped = _mapped(text)
        own += sum(kept for _, kept, _ in mapped)
        for file, size in [*((file, size) for file, _, size in mapped if file[1]), *_open(pid), *_shared(pid)]:
            files[file] = max(files.get(file, 0), size)
    return Held(own, files)


def _mapped(text: str) -> list[tuple[File, int, int]]:
    """Of each file (inode 0: of none): bytes of memory of its own, and of the file's that are in memory."""
    found: dict[File, tuple[int, int]] = {}
    heads = [*_MAPPING.finditer(text)]
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        sizes = {name: 1024 * int(size) for name, size in _FIELD.findall(text[head.end() : end])}
        file = os.makedev(int(head[1], 16), int(head[2], 16)), int(head[3])
        kept, resident = found.get(file, (0, 0))
        more = sizes.get("Rss", 0) - sizes.get("Anonymous", 0)
        found[file] = kept + sum(sizes.get(name, 0) for name in KEEPS), resident + more
    return [(file, kept, resident) for file, (kept, resident) in found.items()]


def _open(pid: int) -> Iterator[tuple[File, int]]:
    """Open files without a name, which are memory or will never be seen again, whether mapped or not."""
    for entry in procfs.listed(f"{procfs.PROC}/{pid}/fd"):
        if (found := procfs.status(entry, follow=True)) and stat.S_ISREG(found.st_mode) and not found.st_nlink:
            yield (found.st_dev, found.st_ino), _BLOCK * found.st_blocks


def _shared(pid: int) -> Iterator[tuple[File, int]]:
    """What lies in the /dev/shm that it sees."""
    todo = [f"{procfs.PROC}/{pid}/root/dev/shm"]
    while todo:
        for entry in procfs.listed(todo.pop()):
            found = procfs.status(entry)
            if found and stat.S_ISDIR(found.st_mode):
                todo.append(entry)
            elif found and stat.S_ISREG(found.st_mode):
                yield (found.st_dev, found.st_ino), _BLOCK * found.st_blocks
