"""The gates. Each takes a Probe and returns figures, or raises Caught with the evidence.

No gate runs in a worker, and none asks it anything but to execute steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tideforge.engine.gates.kv import block_reuse, canary_pages, written_kv
from tideforge.engine.gates.probe import Probe
from tideforge.engine.gates.quality import long_context, quality
from tideforge.engine.gates.running import determinism, interleaved_against_serial

Gate = Callable[[Probe], dict[str, Any]]

# For every candidate that a search would keep (engine/ladder.py): together they see other pages, layers, precision and neighbours.
CHEAP = ("written_kv", "canary_pages", "quality", "interleaved_against_serial")

GATES: dict[str, Gate] = {
    gate.__name__: gate
    for gate in (
        interleaved_against_serial,
        canary_pages,
        block_reuse,
        long_context,
        written_kv,
        quality,
        determinism,
    )
}
