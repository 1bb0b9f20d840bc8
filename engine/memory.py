"""Shared memory: sealed weights, KV arenas, and how their bytes are laid out. numpy only; runs no candidate code."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGN = 64


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one weight lies in the weights segment."""

    name: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class ArenaLayout:
    """KV pages of all layers, then the logits buffer. Pages of layer i: K then V, [num_blocks, block_size, H_kv, D]."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_logits: int
    vocab_size: int

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        return (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def plane_bytes(self) -> int:
        """Bytes of one layer's keys (or values)."""
        return int(np.prod(self.page_shape)) * ITEM_BYTES[self.dtype]

    @property
    def logits_offset(self) -> int:
        return -(-2 * self.num_layers * self.plane_bytes // ALIGN) * ALIGN

    @property
    def bytes(self) -> int:
        return self.logits_offset + self.max_logits * self.vocab_size * 4

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Keeping(Protocol):
    """What an arena on a device asks of the keeper, which alone copies between device and mirror."""

    def fetch(self, offset: int, count: int) -> None: ...
    def fill(self, count: int, value: int) -> None: ...


class Arena:
    """The authority's own view of an arena: it reads and poisons pages without the worker's help.

    `fds`: the host segment, and on a GPU the device memory that it mirrors; `keeping` then brings the mirror up to date.
    """

    def __init__(self, layout: ArenaLayout, fds: Sequence[int], keeping: Keeping | None = None) -> None:
        self.layout, self.fds, self.keeping = layout, fds, keeping
        self._map = mmap.mmap(fds[0], layout.bytes)

    @property
    def worker_fd(self) -> int:
        """Where a worker's pages are."""
        return self.fds[-1]

    def plane(self, layer: int, values: bool = False) -> np.ndarray:
        """Keys (or values) of a layer, [num_blocks, block_size, H_kv, D]; 16-bit floats come as uint16."""
        layout = self.layout
        dtype = np.float32 if layout.dtype == "float32" else np.uint16
        offset = (2 * layer + values) * layout.plane_bytes
        return self._read(offset, int(np.prod(layout.page_shape)), dtype).reshape(layout.page_shape)

    def logits(self, rows: int) -> np.ndarray:
        """The first `rows` rows of the logits buffer, fp32 [rows, V]."""
        count = rows * self.layout.vocab_size
        return self._read(self.layout.logits_offset, count, np.float32).reshape(rows, self.layout.vocab_size)

    def _read(self, offset: int, count: int, dtype: type[np.generic]) -> np.ndarray:
        if self.keeping is not None:
            self.keeping.fetch(offset, count * np.dtype(dtype).itemsize)
        return np.frombuffer(self._map, dtype, count, offset)

    def fill(self, byte: int) -> None:
        """Overwrites all pages: 0x00 for zeros, 0xFF for NaN in every float type."""
        count = 2 * self.layout.num_layers * self.layout.plane_bytes
        if self.keeping is not None:
            return self.keeping.fill(count, byte)
        np.frombuffer(self._map, np.uint8, count)[:] = byte

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def create_segment(name: str, size: int) -> int:
    """An anonymous shared segment that lives as long as somebody holds its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, max(size, 1))
    return fd


def seal(fd: int) -> None:
    """Nobody can write, grow or shrink the segment from now on, whatever rights they hold."""
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def map_read_only(fd: int, size: int) -> mmap.mmap:
    """A mapping in which a store is a SIGSEGV."""
    return mmap.mmap(fd, size, prot=mmap.PROT_READ)
