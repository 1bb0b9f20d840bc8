"""What the price takes from neither data sheet nor model: shares of peak, latencies, fixed costs. data/coefficients.json has
them, each with where it is from; `fit.py` writes those that are fitted."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

MEASURED, FITTED, SPEC_SHEET, GUESSED = "measured", "fitted", "spec-sheet", "guessed"
# Relative uncertainty of a term by where it comes from: repeats of one measured layout differ by 2 to 16 %, coefficients fitted
# to other machines' layouts move by a fifth from fold to fold, kernels reach 65 to 95 % of data sheet bandwidth, and guesses are
# off by up to a factor of two.
UNCERTAINTY = {MEASURED: 0.05, FITTED: 0.1, SPEC_SHEET: 0.15, GUESSED: 0.5}
# Half of the predicted tokens/s of 1,942 measured layouts on GPUs, each family by a fit that never saw it, lie within this of the
# measurement: docs/log.md, by evaluate.py. The terms' own uncertainties say which layouts can be told apart.
TYPICAL_ERROR = 0.1
TIE = 0.05  # gaps below this are within the noise of a measurement
FILE = "coefficients.json"


def stored() -> dict[str, Any]:
    """`coefficients` by name: value, tag (fitted or guessed), source; and the accelerators that some were `fitted_on`."""
    return json.loads((resources.files("tideforge.data") / FILE).read_text())  # type: ignore[no-any-return]


STORED = stored()["coefficients"]
FITTED_ON = frozenset(stored()["fitted_on"])


def _default(name: str) -> float:
    return dataclasses.field(default=float(STORED[name]["value"]))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """Shares are of a data sheet's rate, 0 to 1; `_s` are seconds. A calibration replaces values and adds their names to
    `measured`."""

    read_share: float = _default("read_share")
    kv_read_share: float = _default("kv_read_share")
    expert_read_share: float = _default("expert_read_share")
    flops_share: float = _default("flops_share")
    expert_flops_share: float = _default("expert_flops_share")
    link_share: float = _default("link_share")
    link_latency_s: float = _default("link_latency_s")  # a collective
    link_hop_s: float = _default("link_hop_s")  # more for each GPU that it reaches
    node_latency_s: float = _default("node_latency_s")
    layer_s: float = _default("layer_s")
    moe_layer_s: float = _default("moe_layer_s")  # more for a layer with experts
    ep_layer_s: float = _default("ep_layer_s")  # and more where they are spread over GPUs whole
    step_s: float = _default("step_s")
    request_s: float = _default("request_s")  # a step and sequence
    prompt_s: float = _default("prompt_s")  # a prompt
    stream_passes: float = _default("stream_passes")  # over the hidden vectors, a layer
    expert_stream_passes: float = _default("expert_stream_passes")
    expert_skew: float = _default("expert_skew")  # exponent of the experts' popularity
    expert_imbalance: float = _default("expert_imbalance")  # share of what chance alone makes the fullest group
    pipeline_loss: float = _default("pipeline_loss")
    reserve_bytes: float = _default("reserve_bytes")
    collective_bytes: float = _default("collective_bytes")
    measured: frozenset[str] = frozenset()

    def tag(self, name: str, machine: str) -> str:
        """What is fitted to other accelerators is a guess for this one."""
        if name in self.measured:
            return MEASURED
        return GUESSED if machine not in FITTED_ON else str(STORED[name]["tag"])

    @staticmethod
    def doubt(tag: str) -> float:
        return UNCERTAINTY[tag]


SOURCES = {name: str(entry["source"]) for name, entry in STORED.items()}
