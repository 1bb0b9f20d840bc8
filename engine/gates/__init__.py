"""The gates. Each takes a Probe and returns figures, or raises Caught with the evidence.

No gate runs in a worker, and none asks it anything but to execute steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tideforge.engine.gates.blocks import abort_cycles, permuted_tables
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.gates.conversations import conversations
from tideforge.engine.gates.given import given_pages
from tideforge.engine.gates.kv import block_reuse, canary_pages, held_outputs, nan_pages, written_kv
from tideforge.engine.gates.long import long_context
from tideforge.engine.gates.pages import own_pages
from tideforge.engine.gates.precision import precision
from tideforge.engine.gates.probe import Probe
from tideforge.engine.gates.quality import quality, task_score
from tideforge.engine.gates.rows import alike, every_row, first_look
from tideforge.engine.gates.running import back_to_back, batch_sizes, determinism, interleaved_against_serial
from tideforge.engine.gates.sampling import sampling
from tideforge.engine.limits import kind
from tideforge.errors import UserError

Gate = Callable[[Probe], dict[str, Any]]

# For candidates that a search would keep (engine/ladder.py): what is wrong with pages, layers or neighbours mostly shows at once.
CHEAP = ("first_look",)

GATES: dict[str, Gate] = {
    gate.__name__: gate
    for gate in (
        interleaved_against_serial,
        canary_pages,
        block_reuse,
        long_context,
        written_kv,
        quality,
        task_score,
        precision,
        sampling,
        determinism,
        own_pages,
        given_pages,
        nan_pages,
        held_outputs,
        permuted_tables,
        abort_cycles,
        batch_sizes,
        back_to_back,
        every_row,
        first_look,
        alike,
        conversations,
    )
}

TIMES = 3  # that a fault must show where noise is heavy-tailed


def asked(name: str, probe: Probe) -> dict[str, Any]:
    """A gate's figures. At 16 bits a mixture of experts' noise now and then takes a token to another expert, and a limit with it: what
    fails there must fail on fresh draws again. Raises Caught; Unverifiable also where the endpoint's limits have no room for it."""
    noisy = probe.arena.layout.dtype != "float32" and kind(probe.reference.config) == "sparse"
    try:
        for _ in range(TIMES - 1 if noisy else 0):
            with contextlib.suppress(Caught):
                return GATES[name](probe)
        return GATES[name](probe)
    except UserError as error:
        raise Unverifiable(f"{error.thing} {error.problem}") from None
