"""What the price takes from neither data sheet nor model: shares of peak, latencies, fixed costs. Each says where it is from."""

from __future__ import annotations

import dataclasses

# Relative uncertainty of a term by where it comes from: repeats of one measured layout differ by 2 to 16 %, kernels reach
# 65 to 95 % of data sheet bandwidth, and guesses are off by up to a factor of two.
UNCERTAINTY = {"measured": 0.05, "spec-sheet": 0.15, "guessed": 0.5}
# Half of the predicted tokens/s of 1,942 measured layouts on GPUs lie within this of the measurement: docs/log.md, by evaluate.py.
# The terms' own uncertainties say which layouts can be told apart; added up they would promise far more than this.
TYPICAL_ERROR = 0.33
TIE = 0.05  # gaps below this are within the noise of a measurement


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The few numbers beside data sheets. Nothing here is fitted to layouts; `sources` says where each is from.

    A calibration replaces values and adds their names to `measured`.
    """

    read_share: float = 0.8
    flops_share: float = 0.7
    link_share: float = 0.7
    link_latency_s: float = 8e-6
    node_latency_s: float = 25e-6
    layer_s: float = 8e-6
    step_s: float = 500e-6
    request_s: float = 4.4e-6
    expert_imbalance: float = 0.15
    pipeline_loss: float = 0.5
    reserve_bytes: float = 3.5 * 2**30
    collective_bytes: float = 367e6
    measured: frozenset[str] = frozenset()

    def tag(self, name: str) -> str:
        return "measured" if name in self.measured else "guessed"


SOURCES = {
    "read_share": "aiconfigurator systems/*.yaml: mem_bw_empirical_scaling_factor 0.8",
    "flops_share": "guess: large matrix products reach 60 to 80 % of the dense peak",
    "link_share": "guess: bus bandwidth of NCCL's all-reduce on NVLink is 70 to 80 % of the link",
    "link_latency_s": "guess: a one-shot all-reduce inside a graph takes 5 to 10 us",
    "node_latency_s": "guess: two p2p latencies of 10 us (aiconfigurator) and a local step",
    "layer_s": "1.3 us an empty kernel in a graph (65 in 84 us, read on an H200) times about 6 unfused kernels",
    "step_s": "guess: scheduler, sampling and detokenising of one step",
    "request_s": "published fit of BLIS on H100 with vLLM: 4.4 us a request and step",
    "expert_imbalance": "guess: hottest expert group above the mean at large batches, over and above chance",
    "pipeline_loss": "guess: pipelines are measured at 37 to 70 % of tensor parallel on NVLink; 0.5 costs pp 8 a third",
    "reserve_bytes": "aiconfigurator systems/*.yaml: other_mem 3.5 GiB (context, graphs, workspaces)",
    "collective_bytes": "aiconfigurator systems/*.yaml: nccl_mem 342 to 392 MB",
}
