"""Seeded random weights of a shape: full-entropy, scaled so that logits spread as those of trained weights do, so that a wrong
forward changes tokens.

A model folder may hold random.json in place of safetensors: `describe` writes it. Every process that needs a tensor then draws
it on its own device, from seed and name alone, in any order. `write` puts the same values on a disk for engines that read files.

Values are those of torch's generator: the same for every process on one kind of device (a GPU's name, or "cpu") and one
version of torch, others on another. All processes of an endpoint work on one kind (Settings.device).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tideforge.engine.config import ModelConfig
from tideforge.engine.random_shapes import SHAPES, Drawn, tensors
from tideforge.engine.weights import RANDOM, of_both_kinds
from tideforge.errors import UserError

__all__ = ["SHAPES", "Drawn", "RandomWeights", "describe", "tensors", "write"]
VERSION = 1  # of how values come from a seed; CHUNK is a part of it
CHUNK = 1 << 24  # numbers that are drawn at once, and what memory it takes where they are not wanted in bf16


def describe(folder: Path, shape: str, seed: int = 0, layers: int | None = None) -> Path:
    """config.json and random.json of a named shape: a model folder without weights on the disk. Returns `folder`.

    `layers` takes the first so many only. Raises UserError for an unknown shape or a folder that holds safetensors.
    """
    config = _config(shape, layers)
    if next(folder.glob("*.safetensors"), None):
        raise of_both_kinds(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", config), (RANDOM, {"version": VERSION, "seed": seed})):
        _replace(folder / name, json.dumps(content, indent=1))
    return folder


def write(folder: Path, shape: str, seed: int = 0, device: str = "cpu", layers: int | None = None) -> Path:
    """config.json and model.safetensors (bf16) of a named shape; nothing to do when they are there. Returns `folder`.

    The values are those that `describe` stands for on that device. All tensors are in the host's memory at once. Raises
    UserError for an unknown shape or a folder that holds random.json.
    """
    from safetensors.torch import save_file

    config = _config(shape, layers)
    if (folder / RANDOM).exists():
        raise of_both_kinds(folder)
    drawn, place = RandomWeights(config, seed), torch.device(device)
    origin = {"format": "pt", "drawn": f"seed {seed}, version {VERSION}, torch {torch.__version__}, {kind_of(place)}"}
    if not _holds(folder, config, origin):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        values = {name: drawn.tensor(name, place).cpu() for name in drawn.names}
        save_file(values, folder / "model.safetensors", origin)
        _replace(folder / "config.json", json.dumps(config, indent=1))  # last: a folder with it is whole
    return folder


class RandomWeights:
    """Draws the tensors of a model by name. `config` is what its config.json holds."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self.config, self.seed = config, seed
        self.drawn = {entry.name: entry for entry in tensors(config)}
        self._streams: dict[torch.device, torch.Generator] = {}

    @classmethod
    def load(cls, folder: Path) -> RandomWeights:
        """What a folder's random.json stands for. Raises UserError when it or config.json cannot be followed."""
        if next(folder.glob("*.safetensors"), None):
            raise of_both_kinds(folder)
        ModelConfig.load(folder)  # says what is wrong with it
        return cls(json.loads((folder / "config.json").read_text()), _seed_in(folder / RANDOM))

    @property
    def names(self) -> list[str]:
        return list(self.drawn)

    def fill(self, name: str, target: Tensor) -> None:
        """Overwrites a contiguous tensor of as many numbers, whatever its float type; the values are bf16's.

        One launch a CHUNK where the target is bf16. Not for two threads at once.
        """
        entry, stream = self.drawn[name], self._stream(target.device)
        stream.manual_seed(_seed_of(self.seed, name))
        for part in target.view(-1).split(CHUNK):
            in_place = part.dtype is torch.bfloat16
            values = part if in_place else torch.empty(len(part), dtype=torch.bfloat16, device=part.device)
            values.normal_(entry.mean, entry.deviation, generator=stream)
            if not in_place:
                part.copy_(values)

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """In bf16, drawn anew each time."""
        target = torch.empty(self.drawn[name].shape, dtype=torch.bfloat16, device=device)
        self.fill(name, target)
        return target

    def digest(self, device: torch.device, checksum: int) -> str:
        """SHA-256, hex, over config.json, seed, VERSION, torch's version, the kind of device and the checksum of what was drawn."""
        parts = (self.config, self.seed, VERSION, torch.__version__, kind_of(device), checksum)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _stream(self, device: torch.device) -> torch.Generator:
        if device not in self._streams:
            self._streams[device] = torch.Generator(device)
        return self._streams[device]


def kind_of(device: torch.device) -> str:
    """Devices of one kind draw the same values."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _seed_of(seed: int, name: str) -> int:
    """63 bits for each tensor."""
    return int.from_bytes(hashlib.sha256(f"{VERSION} {seed} {name}".encode()).digest()[:8], "little") >> 1


def _seed_in(path: Path) -> int:
    try:
        raw = json.loads(path.read_text())
        version, seed = raw["version"], raw["seed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            str(path), f"is no description of random weights ({error!r})", "describe the shape again"
        ) from None
    if version != VERSION or not isinstance(seed, int):
        problem = f"has version {version!r} and seed {seed!r}"
        raise UserError(str(path), problem, f"write version {VERSION} and an integer as seed")
    return seed


def _config(shape: str, layers: int | None) -> dict[str, Any]:
    if shape not in SHAPES:
        raise UserError(shape, "is no shape that random weights have", f"there are {', '.join(sorted(SHAPES))}")
    config = dict(SHAPES[shape])
    if layers is not None and not 1 <= layers <= config["num_hidden_layers"]:
        raise UserError("layers", f"{layers} of {shape}", f"it has 1 to {config['num_hidden_layers']}")
    return {**config, "num_hidden_layers": layers or config["num_hidden_layers"]}


def _holds(folder: Path, config: Mapping[str, Any], origin: Mapping[str, str]) -> bool:
    from safetensors import safe_open

    path, weights = folder / "config.json", folder / "model.safetensors"
    if not (path.exists() and weights.exists()) or json.loads(path.read_text()) != config:
        return False
    with safe_open(weights, "pt") as file:
        return bool(file.metadata() == origin)


def _replace(path: Path, text: str) -> None:
    """Atomic; a file that says so already is left alone."""
    if not path.exists() or path.read_text() != text:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text)
        os.replace(partial, path)
