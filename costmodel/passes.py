"""One forward pass as a sum of named terms: what must be read, computed, exchanged, and what each layer and step costs.

`work` says what a pass has to do, in seconds at the data sheet's rates and in counts, without any coefficient; `seconds` prices
it, one pass or arrays of them, so that what is fitted (fit.py) is what ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tideforge.costmodel.coefficients import GUESSED, Coefficients
from tideforge.costmodel.hardware import Hardware
from tideforge.costmodel.layouts import Layout
from tideforge.costmodel.memory import Precision, kv_shards
from tideforge.costmodel.shapes import BYTES, ModelShape


@dataclasses.dataclass(frozen=True)
class Term:
    """Seconds of one named part, tagged by the weakest source it rests on: measured, spec-sheet or guessed."""

    name: str
    seconds: float
    tag: str

    def times(self, factor: float, prefix: str = "") -> Term:
        return dataclasses.replace(self, name=prefix + self.name, seconds=self.seconds * factor)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is priced: everything that stays the same from pass to pass."""

    layout: Layout
    shape: ModelShape
    hardware: Hardware
    precision: Precision
    co: Coefficients


@dataclasses.dataclass(frozen=True)
class Load:
    """One pass of one data parallel rank: `tokens` go through the layers, `rows` of them want logits, `sequences` read
    their cache up to `context` tokens, and each token attends to `attended` tokens on average."""

    tokens: float
    rows: float
    sequences: float
    context: float
    attended: float

    @classmethod
    def decode(cls, batch: float, context: float) -> Load:
        return cls(batch, batch, batch, context, context)

    @classmethod
    def prefill(cls, prompt: float) -> Load:
        return cls(prompt, 1, 0, prompt, prompt / 2)


Number = Any  # a float, or an array [passes]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a pass: how many, how many further GPUs they reach in all, and seconds of full links that they
    fill; the same between nodes."""

    count: Number
    hops: Number
    wire_s: Number
    node_count: Number = 0.0
    node_wire_s: Number = 0.0


@dataclasses.dataclass(frozen=True)
class Part:
    """One GPU's reads and arithmetic in one class of work, over all layers: seconds at full bandwidth and at the dense peak."""

    read_s: Number
    math_s: Number


@dataclasses.dataclass(frozen=True)
class Work:
    """What a pass does on one GPU. `routed`: of one distinct expert a layer (reads), of all tokens (arithmetic)."""

    weights: Part
    head: Part
    kv: Part
    routed: Part
    experts: Number  # a layer, 0: none
    per_token: Number
    tokens: Number  # of the whole expert group
    ep: Number
    stream_s: Number  # to write or read the hidden vectors once a layer
    expert_stream_s: Number  # the same for what goes to this GPU's experts
    layers: Number
    moe_layers: Number
    rows: Number
    prompts: Number  # 1 where the pass is a prefill
    exchanges: Mapping[str, Exchange]


@functools.lru_cache(maxsize=4096)
def coverage(experts: int, per_token: int, tokens: float, skew: float = 0.0) -> float:
    """Distinct experts of a layer that `tokens` tokens reach when each chooses `per_token`, the i-th most popular with a
    probability proportional to i ** -skew."""
    if tokens < 1:
        return per_token * tokens
    popularity = np.arange(1, experts + 1) ** -skew
    chosen = np.minimum(popularity * (per_token / popularity.sum()), 1 - 1e-9)
    return max(float(per_token), float(-np.expm1(np.log1p(-chosen) * tokens).sum()))


def covered(w: Work, skew: float) -> Number:
    """`coverage` of one pass or of arrays of them."""
    if not isinstance(w.tokens, np.ndarray):
        return coverage(int(w.experts), int(w.per_token), float(w.tokens), skew) if w.experts else 0.0
    kinds, at = np.unique(np.stack((w.experts, w.per_token, w.tokens), axis=1), axis=0, return_inverse=True)
    each = [coverage.__wrapped__(int(e), int(k), float(t), skew) if e else 0.0 for e, k, t in kinds]
    return np.array(each)[at.ravel()]


def imbalance(ep: Number, hit: Number, co: Coefficients) -> Number:
    """Fullest expert group over the mean: a share of what chance alone makes it (the largest of `ep` Poisson draws of mean
    hit / ep)."""
    chance = np.sqrt(2 * np.log(ep) / np.maximum(hit / ep, 1e-9))
    return np.minimum(1 + co.expert_imbalance * chance, ep)


def work(s: Setting, load: Load) -> Work:
    """Of one GPU that takes part in every stage; a pipeline's stages add up to the same work one after another."""
    shape, layout, precision, machine = s.shape, s.layout, s.precision, s.hardware
    per_gpu = load.tokens / layout.pcp if load.sequences == 0 else load.tokens
    common = (shape.attention_parameters + shape.dense_ffn_parameters + shape.shared_parameters) / layout.tp
    head = shape.embedding_parameters / layout.tp
    vector_s = shape.hidden * 2.0 / machine.read_bytes_per_s  # activations are held in bf16
    tokens, experts = load.tokens * layout.dp, shape.experts
    each = shape.moe_layers * shape.expert_parameters
    return Work(
        weights=_part(s, common * BYTES[precision.common], 2 * per_gpu * common, precision.common),
        head=_part(s, head * max(2.0, BYTES[precision.common]), 2 * load.rows * head, "bf16"),
        kv=_cache(s, load, per_gpu),
        routed=_part(
            s,
            each / layout.moe_tp * BYTES[precision.experts],
            2 * each * tokens * (experts.per_token if experts else 0) / layout.expert_world,
            precision.experts,
        ),
        experts=experts.routed if experts else 0,
        per_token=experts.per_token if experts else 0,
        tokens=tokens,
        ep=layout.ep,
        stream_s=shape.layers * per_gpu * vector_s,
        expert_stream_s=shape.moe_layers * tokens * (experts.per_token if experts else 0) / layout.ep * vector_s,
        layers=shape.layers,
        moe_layers=shape.moe_layers,
        rows=load.rows,
        prompts=float(load.sequences == 0),
        exchanges=exchanges(s, load),
    )


def _part(s: Setting, read_bytes: float, flops: float, precision: str) -> Part:
    return Part(read_bytes / s.hardware.read_bytes_per_s, flops / s.hardware.flops(precision))


def _cache(s: Setting, load: Load, per_gpu: float) -> Part:
    shape, layout = s.shape, s.layout
    state = sum(group.layers * group.state for group in shape.attention)
    entries = shape.kv_read_elements(load.context) - state
    each = entries / kv_shards(layout, shape) + state / layout.tp
    attended = sum(group.layers * group.work * group.attended(load.attended) for group in shape.attention)
    work = attended + sum(group.layers * group.state for group in shape.attention)
    kv_copies = layout.dcp * layout.pcp if load.sequences else 1
    flops = 2 * per_gpu * work / layout.tp / kv_copies * (layout.dcp if load.sequences else 1)
    kind = "fp32" if s.precision.kv == "fp32" else "bf16"
    return _part(s, load.sequences * each * BYTES[s.precision.kv], flops, kind)


def seconds(w: Work, co: Coefficients) -> dict[str, Number]:
    """Of one pass by term. Reads and arithmetic of a class overlap, the less the nearer they are: together they take the
    4-norm of both, and what that is beyond the reads is a term."""
    hit = covered(w, co.expert_skew)
    uneven = imbalance(w.ep, hit, co)
    parts = {
        "weights": (w.weights, 1.0, 1.0, co.flops_share),
        "head": (w.head, 1.0, 1.0, co.flops_share),
        "KV": (w.kv, 1.0, 1.0, co.flops_share),
        "experts": (w.routed, hit / w.ep * uneven, uneven, co.expert_flops_share),
    }
    reads = {"KV": co.kv_read_share, "experts": co.expert_read_share}
    found: dict[str, Number] = {}
    beyond: Number = 0.0
    for name, (part, more_read, more_math, flops_share) in parts.items():
        read_s = part.read_s * more_read / reads.get(name, co.read_share)
        math_s = part.math_s * more_math / flops_share
        found[f"{name} read"] = read_s
        beyond = beyond + (read_s**4 + math_s**4) ** 0.25 - read_s
    found["arithmetic beyond reads"] = beyond
    found["activations"] = co.stream_passes * w.stream_s + co.expert_stream_passes * w.expert_stream_s * uneven
    for name, e in w.exchanges.items():
        found[f"{name}, in node"] = e.count * co.link_latency_s + e.hops * co.link_hop_s + e.wire_s / co.link_share
        found[f"{name}, between nodes"] = e.node_count * co.node_latency_s + e.node_wire_s / co.link_share
    expert_s = co.moe_layer_s + (w.ep > 1) * co.ep_layer_s
    found["fixed, layers"] = w.layers * co.layer_s + w.moe_layers * expert_s
    found["fixed, step"] = co.step_s + w.rows * co.request_s + w.prompts * co.prompt_s
    return found


def price(s: Setting, load: Load) -> list[Term]:
    """Terms of one pass, tagged by the weakest figure that each rests on."""
    co, machine = s.co, s.hardware
    terms = []
    for name, value in seconds(work(s, load), co).items():
        used = TERMS.get(name, ("link_share", "link_latency_s", "node_latency_s"))
        tags = [co.tag(one, machine.name) for one in used]
        if name.endswith(" read"):
            tags.append(machine.tag("read_bytes_per_s"))
        if name == "arithmetic beyond reads":
            tags.append(machine.tag("flops_per_s.bf16"))
        if name.partition(",")[0] in UNMEASURED or name.endswith("between nodes"):
            tags.append(GUESSED)
        terms.append(Term(name, float(value), max(tags, key=co.doubt)))
    if s.layout.pp > 1:
        loss = co.pipeline_loss * (1 - 1 / s.layout.pp) * sum(term.seconds for term in terms)
        terms.append(Term("pipeline bubbles", loss, co.tag("pipeline_loss", machine.name)))
    return [term for term in terms if term.seconds > 0]


TERMS = {
    "weights read": ("read_share",),
    "head read": ("read_share",),
    "KV read": ("kv_read_share",),
    "experts read": ("expert_read_share", "expert_skew", "expert_imbalance"),
    "arithmetic beyond reads": ("flops_share",),
    "activations": ("stream_passes",),
    "fixed, layers": ("layer_s",),
    "fixed, step": ("step_s",),
}
UNMEASURED = (
    "dcp exchange",
    "pcp exchange",
    "expert exchange",
    "pipeline sends",
)  # hardly in any file of measured layouts


def exchanges(s: Setting, load: Load) -> dict[str, Exchange]:
    """All-reduces of tp, exchanges of an expert world wider than tp, context parallel exchanges, sends between stages."""
    shape, layout = s.shape, s.layout
    vector = load.tokens * shape.hidden * 2.0  # activations travel in bf16
    wide = layout.expert_world > layout.tp
    reduces = shape.layers + (shape.dense_layers if wide else shape.layers)
    found = {"all-reduce": _group(s, layout.tp, reduces, vector / (1 if load.sequences else layout.pcp))}
    if wide and shape.experts:
        tokens = load.tokens * layout.dp * shape.hidden * 2.0
        if layout.ep > 1:  # all-to-all where a token visits fewer GPUs than there are
            tokens *= min(1.0, shape.experts.per_token / layout.expert_world)
        found["expert exchange"] = _group(s, layout.expert_world, 2 * shape.moe_layers, tokens / 2)
    attention = [group for group in shape.attention if group.entry and group.ratio]
    if layout.dcp > 1 and load.sequences:
        widest = max((group.work for group in attention), default=0)
        size = load.tokens * widest / layout.tp * layout.dcp * 2.0
        found["dcp exchange"] = _group(s, layout.dcp, 2 * sum(g.layers for g in attention), size / 2)
    if layout.pcp > 1:
        entry = max((group.entry for group in attention), default=0)
        size = (load.tokens if not load.sequences else load.tokens * 2) * max(entry, 1) * 2.0
        found["pcp exchange"] = _group(s, layout.tp * layout.pcp, shape.layers, size / 2)
    if layout.pp > 1:
        found["pipeline sends"] = _sends(s, vector)
    return found


def _group(s: Setting, size: int, count: int, message_bytes: float) -> Exchange:
    """`count` all-reduces (or gather and scatter pairs of the same bytes) of a message over `size` neighbouring GPUs.

    Ring inside the link domain, and between domains each GPU sends its share of the message over its own card.
    """
    machine = s.hardware
    if size == 1 or count == 0:
        return Exchange(0.0, 0.0, 0.0)
    inside, domains = min(size, machine.link_domain), math.ceil(size / machine.link_domain)
    wire_s = 2 * (inside - 1) / inside * message_bytes / machine.link_bytes_per_s
    if domains == 1:
        return Exchange(count, count * (size - 1), count * wire_s)
    between_s = 2 * (domains - 1) / domains * message_bytes / inside / machine.node_link_bytes_per_s
    return Exchange(count, count * (inside - 1), count * wire_s, count, count * between_s)


def _sends(s: Setting, vector_bytes: float) -> Exchange:
    layout, machine = s.layout, s.hardware
    count, share = float(layout.pp - 1), vector_bytes / layout.tp
    if layout.gpus_per_server > machine.link_domain:
        return Exchange(0.0, 0.0, 0.0, count, count * share / machine.node_link_bytes_per_s)
    return Exchange(count, 0.0, count * share / machine.link_bytes_per_s)
