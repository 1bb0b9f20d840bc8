"""Memory of one GPU by part, and how many sequences its KV space holds."""

from __future__ import annotations

import dataclasses

from tideforge.costmodel.coefficients import Coefficients
from tideforge.costmodel.hardware import Hardware
from tideforge.costmodel.layouts import Layout
from tideforge.costmodel.shapes import BYTES, ModelShape

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Precision:
    """Storage of weights (routed experts may differ) and KV cache, by the names of shapes.BYTES."""

    common: str
    experts: str
    kv: str

    @classmethod
    def of(cls, shape: ModelShape, kv: str | None = None) -> Precision:
        """As the checkpoint has it. The KV cache stays in bf16 (fp32 for an fp32 checkpoint) unless asked otherwise."""
        return cls(shape.common_precision, shape.precision, kv or ("fp32" if shape.precision == "fp32" else "bf16"))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Batch limits of the engine. `max_model_len` is None where the launch command does not set it."""

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    memory_share: float = 0.9
    kv_tokens: int | None = None  # a fixed KV space instead of what memory leaves


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one GPU. `kv_bytes` is what is left for the cache, below zero when the rest does not fit."""

    total_bytes: float
    usable_bytes: float
    weight_bytes: float
    activation_bytes: float
    reserve_bytes: float

    @property
    def kv_bytes(self) -> float:
        return self.usable_bytes - self.weight_bytes - self.activation_bytes - self.reserve_bytes

    def text(self) -> str:
        parts = (
            ("weights", self.weight_bytes),
            ("activations", self.activation_bytes),
            ("reserve", self.reserve_bytes),
        )
        listed = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
        return f"{listed} of {self.usable_bytes / GIB:.1f} GiB usable"


def kv_shards(layout: Layout, shape: ModelShape) -> int:
    """GPUs over which one stage's KV entries are spread; further tp ranks hold copies unless dcp splits them."""
    return min(layout.tp, shape.kv_heads) * layout.dcp * layout.pcp


def weight_bytes(layout: Layout, shape: ModelShape, precision: Precision) -> float:
    """Of one GPU. Experts spread over the whole expert world whether by ep or by tp; everything else over tp."""
    routed = shape.routed_parameters * BYTES[precision.experts]
    rest = shape.weight_bytes(precision.common, precision.experts) - routed
    return (rest / layout.tp + routed / layout.expert_world) / layout.pp


def sequence_bytes(layout: Layout, shape: ModelShape, precision: Precision, context: float) -> float:
    """KV bytes of one sequence on one GPU. Recurrent state splits by heads, so over all of tp."""
    state = sum(group.layers * group.state for group in shape.attention)
    entries = shape.kv_elements(context) - state
    return BYTES[precision.kv] * (entries / kv_shards(layout, shape) + state / layout.tp) / layout.pp


def memory_of(
    layout: Layout, shape: ModelShape, hardware: Hardware, precision: Precision, limits: Limits, co: Coefficients
) -> Memory:
    """Activations: residual stream, Q/K/V and the widest matrix of a full prefill chunk, and fp32 logits of a full batch."""
    widest = max(shape.ffn, shape.experts.per_token * shape.experts.width if shape.experts else 0)
    chunk = limits.max_num_batched_tokens * 2 * (6 * shape.hidden + 2 * widest / layout.tp) / layout.pcp
    logits = min(limits.max_num_seqs, 1024) * shape.vocab * 4 / layout.tp
    reserve = min(co.reserve_bytes, 0.05 * hardware.memory_bytes) + (
        co.collective_bytes if layout.gpus_per_server > 1 else 0
    )
    return Memory(
        total_bytes=hardware.memory_bytes,
        usable_bytes=hardware.memory_bytes * limits.memory_share,
        weight_bytes=weight_bytes(layout, shape, precision),
        activation_bytes=chunk + logits,
        reserve_bytes=reserve,
    )


def kv_slots(
    layout: Layout, shape: ModelShape, precision: Precision, limits: Limits, memory: Memory, context: float
) -> float:
    """Sequences of `context` tokens that one rank's KV space holds at a time (below 1: not even one)."""
    if limits.kv_tokens is not None:
        return limits.kv_tokens / context
    return memory.kv_bytes / sequence_bytes(layout, shape, precision, context)
