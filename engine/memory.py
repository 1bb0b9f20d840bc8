"""Shared memory: sealed weights, KV arenas, and how their bytes are laid out. numpy only; runs no candidate code."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tideforge.engine.digests import Plane, of_array

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGN = 64
UNTOUCHED = 0x7FC5A5A5  # as fp32 a NaN; a worker fills the logits with it before each step


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one weight lies in the weights segment."""

    name: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class ArenaLayout:
    """KV pages of all layers, then the logits buffer. Pages of layer i: K then V, [num_blocks, block_size, heads, dim].

    K and V may differ in their last dimension: latent attention caches something else in each (ModelConfig.key_dim).
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    max_logits: int
    vocab_size: int

    def page_shape(self, values: bool) -> tuple[int, int, int, int]:
        """Of one layer's values or keys."""
        return (self.num_blocks, self.block_size, self.num_kv_heads, self.value_dim if values else self.key_dim)

    def plane_bytes(self, values: bool) -> int:
        """Bytes of one layer's values or keys."""
        return int(np.prod(self.page_shape(values))) * ITEM_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return self.plane_bytes(values=False) + self.plane_bytes(values=True)

    def plane_offset(self, layer: int, values: bool) -> int:
        """Where they begin in the arena."""
        return layer * self.layer_bytes + (self.plane_bytes(values=False) if values else 0)

    @property
    def planes(self) -> list[Plane]:
        """Of layer 0 keys, then values, of layer 1 keys, ..."""
        slots = self.num_blocks * self.block_size
        return [
            Plane(self.plane_offset(layer, values), slots, self.plane_bytes(values) // slots)
            for layer in range(self.num_layers)
            for values in (False, True)
        ]

    @property
    def pages_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def logits_offset(self) -> int:
        return -(-self.pages_bytes // ALIGN) * ALIGN

    @property
    def bytes(self) -> int:
        return self.logits_offset + self.max_logits * self.vocab_size * 4

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Keeping(Protocol):
    """What an arena on a device asks of the keeper, which alone copies between device and mirror."""

    def fetch(self, offset: int, count: int) -> None: ...
    def store(self, offset: int, count: int) -> None: ...
    def digests(self, planes: Sequence[Plane], secret: int) -> np.ndarray: ...
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
        """Keys (or values) of a layer, [num_blocks, block_size, heads, dim]; 16-bit floats come as uint16."""
        layout = self.layout
        shape = layout.page_shape(values)
        return self._read(layout.plane_offset(layer, values), int(np.prod(shape)), self._bits).reshape(shape)

    def digests(self, secret: int) -> np.ndarray:
        """Of every slot, uint64 [planes, slots] (digests.py), in the order of layout.planes; computed where the pages lie."""
        if self.keeping is not None:
            return self.keeping.digests(self.layout.planes, secret)
        pages = np.frombuffer(self._map, np.uint8)
        return np.stack([of_array(pages, plane, secret) for plane in self.layout.planes])

    def marks(self, secret: int) -> list[np.ndarray]:
        """Of each plane what tells whether a slot changed, uint8 [slots, n]: digests from a device; on the host, where it costs
        less, the bytes themselves, which are no copy."""
        if self.keeping is not None:
            return [digest.view(np.uint8).reshape(-1, 8) for digest in self.digests(secret)]
        pages = np.frombuffer(self._map, np.uint8)
        return [
            pages[at.offset : at.offset + at.slots * at.each].reshape(at.slots, at.each) for at in self.layout.planes
        ]

    def slots(self, layer: int, values: bool, slots: np.ndarray) -> np.ndarray:
        """What these slots (block * block_size + offset) hold, [len(slots), heads, dim]: a copy. Nothing else is fetched."""
        if self.keeping is not None:
            for offset, count in self._runs(layer, values, slots):
                self.keeping.fetch(offset, count)
        return self._mirrored(layer, values)[slots]

    def _mirrored(self, layer: int, values: bool) -> np.ndarray:
        """The host's bits of a plane, [slots, heads, dim]; on a GPU as they were when they were fetched."""
        shape, offset = self.layout.page_shape(values), self.layout.plane_offset(layer, values)
        return np.frombuffer(self._map, self._bits, int(np.prod(shape)), offset).reshape(-1, *shape[2:])

    def _runs(self, layer: int, values: bool, slots: np.ndarray) -> list[tuple[int, int]]:
        """Where each run of neighbouring slots begins in the arena, and its bytes."""
        plane = self.layout.planes[2 * layer + values]
        places = np.unique(slots)
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        return [(plane.offset + int(run[0]) * plane.each, len(run) * plane.each) for run in runs]

    @property
    def _bits(self) -> type[np.generic]:
        """What numpy has for the pages' precision."""
        return np.float32 if self.layout.dtype == "float32" else np.uint16

    def logits(self, rows: int) -> np.ndarray:
        """The first `rows` rows of the logits buffer, fp32 [rows, V]."""
        count = rows * self.layout.vocab_size
        return self._read(self.layout.logits_offset, count, np.float32).reshape(rows, self.layout.vocab_size)

    def _read(self, offset: int, count: int, dtype: type[np.generic]) -> np.ndarray:
        if self.keeping is not None:
            self.keeping.fetch(offset, count * np.dtype(dtype).itemsize)
        return np.frombuffer(self._map, dtype, count, offset)

    def store(self, layer: int, values: bool, slots: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        """Writes `data` [len(slots), heads, dim], in the bits that `plane` has, into slots (block * block_size + offset) of a layer."""
        places = np.asarray(slots, np.int64)
        if not len(places):
            return
        self._mirrored(layer, values)[places] = data
        if self.keeping is not None:
            for offset, count in self._runs(layer, values, places):
                self.keeping.store(offset, count)

    def fill(self, byte: int) -> None:
        """Overwrites all pages: 0x00 for zeros, 0xFF for NaN in every float type."""
        if self.keeping is not None:
            return self.keeping.fill(self.layout.pages_bytes, byte)
        np.frombuffer(self._map, np.uint8, self.layout.pages_bytes)[:] = byte

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
