"""What every slot of the pages ought to hold: what the authority remembers of them, against what lies there."""

from __future__ import annotations

import secrets

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
    """The marks (Arena.marks) of all slots, of which each step's write slots are renewed once answered. The dummy page is anybody's."""

    def __init__(self, probe: Probe) -> None:
        self.arena, self.secret = probe.arena, secrets.randbits(128)
        self.copies = [marks.copy() for marks in self.arena.marks(self.secret)]
        self.last_written = np.zeros(0, np.int64)

    @property
    def slots(self) -> int:
        layout = self.arena.layout
        return layout.num_blocks * layout.block_size

    def take(self, step: Step) -> None:
        """What the step wrote is what its slots hold from now on."""
        size = self.arena.layout.block_size
        self.last_written = np.unique(np.concatenate((write_slots_of(step, size), np.arange(size))))
        for marks, copy in zip(self.arena.marks(self.secret), self.copies, strict=True):
            copy[self.last_written] = marks[self.last_written]

    def require(self, what: str) -> None:
        """Raises Caught, which names the first slot that holds something else."""
        for index, (marks, copy) in enumerate(zip(self.arena.marks(self.secret), self.copies, strict=True)):
            if np.array_equal(marks, copy):
                continue
            layer, side = index // 2, "values" if index % 2 else "keys"
            differ = (marks != copy).any(axis=1)
            differ[: self.arena.layout.block_size] = False
            if differ.any():
                slot = int(differ.argmax())
                own = "of the last step's own" if slot in self.last_written else "not of the last step's own"
                raise Caught(f"layer {layer} {side}: slot {slot} {what} ({own}); {int(differ.sum())} slots in all")
