"""A Probe of a forward in this process, on the pages of an arena: what a worker's gates see, without a worker."""

from __future__ import annotations

import random

import torch

from tideforge.data.workload import RequestShape
from tideforge.engine.compare import Bounds
from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.contract import KVGroup
from tideforge.engine.executor import Executor
from tideforge.engine.forward import Forward
from tideforge.engine.gates.probe import Probe
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.memory import Arena, create_segment
from tideforge.engine.reference import Reference

TEXT = tuple((7 * i + i * i // 11) % 300 + 3 for i in range(4000))
SHAPES = tuple(RequestShape(length, 12) for length in (9, 14, 21, 33, 5, 17, 48, 26))


class ArenaMemory(LocalMemory):
    """As LocalMemory, its pages and logits in an arena that the authority reads and writes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        layout = settings.arena_layout(ModelConfig.load(settings.model))
        self.arena = Arena(layout, [create_segment("test", layout.bytes)])
        whole = torch.frombuffer(self.arena._map, dtype=torch.uint8)

        def view(layer: int, side: bool) -> torch.Tensor:
            at = layout.plane_offset(layer, side)
            return whole[at : at + layout.plane_bytes(side)].view(self.dtype).view(layout.page_shape(side))

        keys, values = (tuple(view(layer, side) for layer in range(layout.num_layers)) for side in (False, True))
        self.group = KVGroup(layout.block_size, keys, values)
        self.logits = whole[layout.logits_offset : layout.bytes].view(torch.float32).view(-1, layout.vocab_size)


def local_probe(
    settings: Settings, forward: Forward, reference: Reference, bounds: Bounds, seed: int | None = None
) -> Probe:
    memory = ArenaMemory(settings)
    worker: Executor = LocalExecutor(forward, memory)
    secret = random.Random(seed)
    return Probe(
        forward.id, worker, memory.arena, reference, settings.limits, range(memory.config.num_hidden_layers), bounds,
        TEXT, lambda: secret.getrandbits(63), shapes=SHAPES, users=6,
    )  # fmt: skip
