"""What every slot of the pages ought to hold: what the authority remembers of them, against what lies there."""

from __future__ import annotations

import numpy as np

from tideforge.engine.gates.caught import Caught
from tideforge.engine.gates.probe import Probe
from tideforge.engine.scheduler import Step


def write_slots_of(step: Step, block_size: int) -> np.ndarray:
    """Slots that a step may write, all of its runs together."""
    if step.num_steps == 1:
        return step.slot_mapping
    at = step.positions[:, None] + np.arange(step.num_steps)
    columns = np.minimum(at // block_size, step.block_tables.shape[1] - 1)
    blocks = np.take_along_axis(step.block_tables, columns, axis=1).astype(np.int64)
    return (blocks * block_size + at % block_size).reshape(-1)


class Shadow:
    """A copy of all pages, in which each step's write slots are renewed once it was answered. The dummy page is anybody's."""

    def __init__(self, probe: Probe) -> None:
        self.arena, self.layers = probe.arena, range(probe.arena.layout.num_layers)
        self.copies = [plane.copy() for _, _, plane in self._planes()]
        self.last_written = np.zeros(0, np.int64)

    @property
    def slots(self) -> int:
        layout = self.arena.layout
        return layout.num_blocks * layout.block_size

    def take(self, step: Step) -> None:
        """What the step wrote is what its slots hold from now on."""
        size = self.arena.layout.block_size
        self.last_written = np.unique(np.concatenate((write_slots_of(step, size), np.arange(size))))
        for (_, _, plane), copy in zip(self._planes(), self.copies, strict=True):
            _slots(copy)[self.last_written] = _slots(plane)[self.last_written]

    def require(self, what: str) -> None:
        """Raises Caught, which names the first slot that holds something else."""
        for (layer, side, plane), copy in zip(self._planes(), self.copies, strict=True):
            if np.array_equal(_words(plane), _words(copy)):
                continue
            differ = (_slots(plane).view(np.uint8) != _slots(copy).view(np.uint8)).reshape(self.slots, -1).any(axis=1)
            differ[: self.arena.layout.block_size] = False
            if differ.any():
                slot = int(differ.argmax())
                own = "of the last step's own" if slot in self.last_written else "not of the last step's own"
                raise Caught(f"layer {layer} {side}: slot {slot} {what} ({own}); {int(differ.sum())} slots in all")

    def _planes(self) -> list[tuple[int, str, np.ndarray]]:
        sides = ((False, "keys"), (True, "values"))
        return [(layer, name, self.arena.plane(layer, side)) for layer in self.layers for side, name in sides]


def _slots(plane: np.ndarray) -> np.ndarray:
    return plane.reshape(-1, *plane.shape[2:])


def _words(plane: np.ndarray) -> np.ndarray:
    """NaN compares unequal to itself: bits, not numbers."""
    return plane.view(np.uint32 if plane.itemsize == 4 else np.uint16)
