"""Reads a checkpoint's safetensors into named arrays, without copying and without torch.

Format (safetensors' README): 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the data. bfloat16 has no numpy type and comes as its bits in uint16. A checkpoint in several files has
model.safetensors.index.json, whose weight_map says which file holds which tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tideforge.errors import UserError

NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
INDEX = "model.safetensors.index.json"
RANDOM = "random.json"  # in its place a folder holds no weights but how to draw them (random_weights.py)
REMEDY = "fetch the checkpoint again"
Tensors = dict[str, tuple[str, np.ndarray]]  # name -> (safetensors dtype, array as stored)


class Checkpoint:
    """The float tensors of a model folder, mapped: a tensor costs memory only when it is read.

    Raises UserError that names the file when the folder has no weights, a file or tensor of the index is absent, or a
    file is truncated or malformed. With an index, files and tensors that it does not name are left alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        indexed = (folder / INDEX).exists()
        if not files and not indexed:
            raise UserError(str(folder), "holds no *.safetensors", "give a model folder; `tideforge weights` makes one")
        parts = _read_shards(folder) if indexed else map(_read_file, files)
        self._tensors = {name: entry for part in parts for name, entry in part.items() if entry[0] in NUMPY}

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


def fingerprint(folder: Path) -> str:
    """Changes when the folder holds other weights: hex, over what is cheap to read of its files (not the weights themselves)."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    for path in (folder / "config.json", folder / INDEX, folder / RANDOM):
        if path.exists():
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def of_both_kinds(folder: Path) -> UserError:
    """A folder of random weights and files must not be taken for the other."""
    return UserError(str(folder), f"holds {RANDOM} and safetensors, or would", "take another folder")


def read_tensors(folder: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (name, safetensors dtype, array) of every float tensor of a model folder."""
    checkpoint = Checkpoint(folder)
    for name in checkpoint.names:
        yield name, *checkpoint.stored(name)


def to_float32(dtype: str, array: np.ndarray) -> np.ndarray:
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _read_shards(folder: Path) -> Iterator[Tensors]:
    """The tensors of each file that the index names, those alone."""
    where = _weight_map(folder / INDEX)
    for file in sorted(set(where.values())):
        path = folder / file
        if not path.is_file():
            raise UserError(str(path), f"is absent, but {INDEX} names it", REMEDY)
        held = _read_file(path)
        wanted = [name for name, place in where.items() if place == file]
        if missing := [name for name in wanted if name not in held]:
            raise UserError(str(path), f"holds no tensor {missing[0]}, but {INDEX} says so", REMEDY)
        yield {name: held[name] for name in wanted}


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        return {str(tensor): str(file) for tensor, file in json.loads(path.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(str(path), "has no readable weight_map", REMEDY) from None


def _read_file(path: Path) -> Tensors:
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
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], _view(path, data, 8 + header_bytes, name, entry)) for name, entry in header.items()}


def _view(path: Path, data: mmap.mmap, base: int, name: str, entry: dict[str, Any]) -> np.ndarray:
    """A tensor as stored. What is no float comes as its bytes; nobody reads it."""
    if entry["dtype"].startswith("F") and entry["dtype"] not in NUMPY:
        raise UserError(str(path), f"holds {name} in {entry['dtype']}", "convert the weights to bfloat16 first")
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    dtype = np.dtype(NUMPY.get(entry["dtype"], np.uint8))
    count = math.prod(shape) if entry["dtype"] in NUMPY else end - begin
    if base + end > len(data) or end - begin != count * dtype.itemsize:
        raise UserError(str(path), f"is truncated or malformed at {name}", REMEDY)
    array = np.frombuffer(data, dtype, count, base + begin)
    return array.reshape(shape) if entry["dtype"] in NUMPY else array
