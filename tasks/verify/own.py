"""The gates that need more than a probe: workers of their own, the incumbent, the files. Each takes a Trialled and returns
figures, or raises Caught with the evidence, or Unverifiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tideforge.tasks.verify.fresh import other_weights, sentinel
from tideforge.tasks.verify.packing import packing
from tideforge.tasks.verify.provenance import provenance
from tideforge.tasks.verify.trialled import Trialled
from tideforge.tasks.verify.unharmed import incumbent_unharmed

OWN: dict[str, Callable[[Trialled], dict[str, Any]]] = {
    gate.__name__: gate for gate in (other_weights, sentinel, packing, incumbent_unharmed, provenance)
}
