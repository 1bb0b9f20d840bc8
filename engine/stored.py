"""A model folder's weights as torch tensors of one device, one at a time: read from safetensors, or drawn where random.json is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tideforge.engine.random_weights import RandomWeights
from tideforge.engine.weights import RANDOM, Checkpoint


class Stored(Protocol):
    @property
    def names(self) -> list[str]: ...

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """In the type that it is stored in. On the CPU it may be a view of a file: never write it."""
        ...


class Files:
    """A checkpoint. On the CPU tensors are views of mapped files, which cost memory when they are read."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint(folder)

    @property
    def names(self) -> list[str]:
        return self.checkpoint.names

    def tensor(self, name: str, device: torch.device) -> Tensor:
        dtype, array = self.checkpoint.stored(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array.view(np.int16) if dtype == "BF16" else array)
        return (tensor.view(torch.bfloat16) if dtype == "BF16" else tensor).to(device)


def open_folder(folder: Path) -> Stored:
    """Raises UserError that names what is wrong with the folder."""
    return RandomWeights.load(folder) if (folder / RANDOM).exists() else Files(folder)
