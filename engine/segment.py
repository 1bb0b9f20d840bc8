"""Segments of shared memory, as the keeper owns them: on the host, or on a device. No candidate code runs here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tideforge.engine import digests, memory
from tideforge.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

WORDS = 1 << 24  # that a checksum takes at once

Filler = Callable[["Tensor"], None]  # writes all bytes, uint8 [size], the same each time


class Segment:
    """Shared host memory; whoever has the descriptor reads it, and writes it until it is published.

    `filler`, if there is one, says what is published; else its holders write it before.
    """

    def __init__(self, name: str, size: int, filler: Filler | None = None) -> None:
        self.size, self.fds, self.filler = size, [memory.create_segment(f"tideforge-{name}", size)], filler
        self.checksum = 0  # of what the filler wrote

    def publish(self) -> None:
        """From now on nobody can write it."""
        if self.filler is not None:
            self.checksum = self._fill(self.filler)
        memory.seal(self.fds[0])

    def _fill(self, filler: Filler) -> int:
        import torch

        pages = torch.frombuffer(mmap.mmap(self.fds[0], self.size), dtype=torch.uint8)
        filler(pages)
        return checksum(pages)  # the mapping ends here, or sealing would be refused

    def restore(self) -> bool:
        """Whether the published bytes are as they were: nobody can have written sealed memory."""
        return True

    def copy_to(self, pages: Tensor) -> None:
        """Its bytes into as many of the same device's."""
        held = np.frombuffer(mmap.mmap(self.fds[0], self.size, prot=mmap.PROT_READ), np.uint8)
        np.copyto(pages.numpy(), held)

    def fetch(self, offset: int, count: int) -> None:
        """Nothing to do: holders see the bytes themselves."""

    def store(self, offset: int, count: int) -> None:
        """As fetch, the other way: nothing to do."""

    def digests(self, planes: Sequence[digests.Plane], secret: int) -> np.ndarray:
        """uint64 [planes, slots]; all planes have as many slots."""
        held = np.frombuffer(mmap.mmap(self.fds[0], self.size, prot=mmap.PROT_READ), np.uint8)
        return np.stack([digests.of_array(held, plane, secret) for plane in planes])

    def fill(self, count: int, value: int) -> None:
        raise ProtocolError("host memory is filled by its holders")

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class DeviceSegment(Segment):
    """Device memory, the last of fds. Without a filler it has a mirror in host memory (fds[0]), so that an authority needs no CUDA
    context; what is published comes from there."""

    def __init__(self, name: str, size: int, device: str, filler: Filler | None = None) -> None:
        import torch

        from tideforge.engine import device as device_memory

        self.size, self.fds, self.filler = size, [], filler
        if filler is None:
            self.fds.append(memory.create_segment(f"tideforge-{name}", size))
            self.mirror = torch.frombuffer(mmap.mmap(self.fds[0], size), dtype=torch.uint8)
        fd, self.pages = device_memory.allocate(size, torch.device(device))
        self.fds.append(fd)
        self.pages.zero_()

    def publish(self) -> None:
        self.checksum = self._write()

    def restore(self) -> bool:
        """Whether the published bytes are as they were; if not they are written again."""
        intact = checksum(self.pages) == self.checksum
        if not intact and self._write() != self.checksum:
            raise ProtocolError("somebody wrote the weights, and they cannot be restored")
        return intact

    def _write(self) -> int:
        if self.filler is None:
            self.pages.copy_(self.mirror)
        else:
            self.pages.zero_()  # what lies between tensors
            self.filler(self.pages)
        return checksum(self.pages)

    def copy_to(self, pages: Tensor) -> None:
        pages.copy_(self.pages)

    def fetch(self, offset: int, count: int) -> None:
        self.mirror[offset : offset + count].copy_(self.pages[offset : offset + count])

    def store(self, offset: int, count: int) -> None:
        self.pages[offset : offset + count].copy_(self.mirror[offset : offset + count])
        self.pages[:1].cpu()  # it has happened when the answer goes out

    def digests(self, planes: Sequence[digests.Plane], secret: int) -> np.ndarray:
        return np.stack([digests.of_tensor(self.pages, plane, secret) for plane in planes])

    def fill(self, count: int, value: int) -> None:
        self.pages[:count].fill_(value)
        self.pages[:1].cpu()  # it has happened when the answer goes out


def checksum(pages: Tensor) -> int:
    """Of uint8 [size]: every whole 8-byte word times an odd number that depends on its place, modulo 2**64."""
    import torch

    words = pages[: len(pages) // 8 * 8].view(torch.int64)
    odd = 2 * torch.arange(min(WORDS, len(words)), device=pages.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=pages.device)
    for start in range(0, len(words), WORDS):
        part = words[start : start + WORDS]
        total += (part * odd[: len(part)]).sum() + 2 * start * part.sum()
    return int(total) % (1 << 64)
