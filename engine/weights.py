"""Reads a checkpoint's safetensors into named arrays, without copying and without torch.

Format (safetensors' README): 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the data. bfloat16 has no numpy type and comes as its bits in uint16.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tideforge.errors import UserError

NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
REMEDY = "fetch the checkpoint again"


class Checkpoint:
    """The float tensors of a model folder, mapped: a tensor costs memory only when it is read.

    Raises UserError that names the file when the folder has no weights, or a file is truncated or malformed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(str(folder), "holds no *.safetensors", "give a model folder; `tideforge weights` makes one")
        self._tensors = {name: entry for path in files for name, entry in _read_file(path).items()}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def stored(self, name: str) -> tuple[str, np.ndarray]:
        """(safetensors dtype, read-only array as stored)."""
        if name not in self._tensors:
            raise UserError(str(self.folder), f"has no tensor {name}", "give the checkpoint that config.json describes")
        return self._tensors[name]

    def float32(self, name: str) -> np.ndarray:
        """The tensor in fp32; a view when it is stored so, a copy otherwise. Exact for fp16 and bfloat16."""
        dtype, array = self.stored(name)
        return to_float32(dtype, array)


def read_tensors(folder: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (name, safetensors dtype, array) of every float tensor of a model folder."""
    checkpoint = Checkpoint(folder)
    for name in checkpoint.names:
        yield name, *checkpoint.stored(name)


def to_float32(dtype: str, array: np.ndarray) -> np.ndarray:
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _read_file(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    with path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + header_bytes > size:
            raise UserError(str(path), "is truncated or no safetensors file", REMEDY)
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            raise UserError(str(path), "has a malformed header", REMEDY) from None
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    base = 8 + header_bytes
    return {
        name: (entry["dtype"], _view(path, data, base, name, entry))
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in NUMPY
    }


def _view(path: Path, data: mmap.mmap, base: int, name: str, entry: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(NUMPY[entry["dtype"]])
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    count = math.prod(shape)
    if base + end > len(data) or end - begin != count * dtype.itemsize:
        raise UserError(str(path), f"is truncated or malformed at {name}", REMEDY)
    return np.frombuffer(data, dtype, count, base + begin).reshape(shape)
