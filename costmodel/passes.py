"""One forward pass as a sum of named terms: what must be read, computed, exchanged, and what each layer and step costs."""

from __future__ import annotations

import dataclasses
import math

from tideforge.costmodel.coefficients import Coefficients
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


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes read and floating-point operations of one GPU in one class of work, over all layers."""

    name: str
    read_bytes: float
    flops: float
    precision: str


def coverage(experts: int, per_token: int, tokens: float) -> float:
    """Distinct experts of a layer that `tokens` tokens reach when each chooses `per_token` at random."""
    return experts * (1 - (1 - per_token / experts) ** tokens) if tokens >= 1 else per_token * tokens


def imbalance(layout: Layout, hit: float, co: Coefficients) -> float:
    """Fullest expert group over the mean: chance (the largest of `ep` Poisson draws of mean hit / ep) and a stated skew."""
    if layout.ep == 1:
        return 1.0
    mean = max(hit / layout.ep, 1e-9)
    chance = math.sqrt(2 * math.log(layout.ep) / mean)
    return min(1 + chance, layout.ep) * (1 + co.expert_imbalance * (1 - 1 / layout.ep))


def parts(s: Setting, load: Load) -> list[Part]:
    """Of one GPU that takes part in every stage; a pipeline's stages add up to the same work one after another."""
    shape, layout, precision = s.shape, s.layout, s.precision
    per_gpu = load.tokens / layout.pcp if load.sequences == 0 else load.tokens
    common = shape.attention_parameters + shape.dense_ffn_parameters + shape.shared_parameters
    head = shape.embedding_parameters / layout.tp
    found = [
        Part(
            "weights", common / layout.tp * BYTES[precision.common], 2 * per_gpu * common / layout.tp, precision.common
        ),
        Part("head", head * max(2.0, BYTES[precision.common]), 2 * load.rows * head, "bf16"),
        _cache(s, load, per_gpu),
    ]
    return [*found, _routed(s, load)] if shape.experts else found


def _cache(s: Setting, load: Load, per_gpu: float) -> Part:
    shape, layout = s.shape, s.layout
    state = sum(group.layers * group.state for group in shape.attention)
    entries = shape.kv_read_elements(load.context) - state
    each = entries / kv_shards(layout, shape) + state / layout.tp
    attended = sum(group.layers * group.work * group.attended(load.attended) for group in shape.attention)
    work = attended + sum(group.layers * group.state for group in shape.attention)
    kv_copies = layout.dcp * layout.pcp if load.sequences else 1
    flops = 2 * per_gpu * work / layout.tp / kv_copies * (layout.dcp if load.sequences else 1)
    return Part(
        "KV", load.sequences * each * BYTES[s.precision.kv], flops, "fp32" if s.precision.kv == "fp32" else "bf16"
    )


def _routed(s: Setting, load: Load) -> Part:
    """Expert weights that the batch of the whole expert group touches; every token computes its own experts."""
    shape, layout, experts = s.shape, s.layout, s.shape.experts
    assert experts is not None
    tokens = load.tokens * layout.dp
    hit = coverage(experts.routed, experts.per_token, tokens)
    skew = min(imbalance(layout, hit, s.co), layout.ep * 1.0)
    touched = min(hit * skew / layout.ep, experts.routed / layout.ep)
    read = shape.moe_layers * touched * shape.expert_parameters / layout.moe_tp * BYTES[s.precision.experts]
    share = skew / layout.expert_world
    flops = 2 * shape.moe_layers * tokens * experts.per_token * shape.expert_parameters * share
    return Part("experts", read, flops, s.precision.experts)


def price(s: Setting, load: Load) -> list[Term]:
    """Terms of one pass. Reads and arithmetic of a class overlap: what arithmetic takes beyond its reads is a term."""
    hardware, co = s.hardware, s.co
    read_tag, flop_tag = hardware.tag("read_bytes_per_s"), hardware.tag("flops_per_s.bf16")
    terms, beyond = [], 0.0
    for part in parts(s, load):
        read_s = part.read_bytes / (hardware.read_bytes_per_s * co.read_share)
        flops_s = part.flops / (hardware.flops(part.precision) * co.flops_share)
        terms.append(Term(f"{part.name} read", read_s, read_tag))
        beyond += max(0.0, flops_s - read_s)
    terms.append(Term("arithmetic beyond reads", beyond, flop_tag))
    terms += collectives(s, load)
    terms.append(Term("fixed, layers", s.shape.layers * co.layer_s, co.tag("layer_s")))
    terms.append(Term("fixed, step", co.step_s + load.rows * co.request_s, co.tag("step_s")))
    if s.layout.pp > 1:
        loss = co.pipeline_loss * (1 - 1 / s.layout.pp) * sum(term.seconds for term in terms)
        terms.append(Term("pipeline bubbles", loss, co.tag("pipeline_loss")))
    return [term for term in terms if term.seconds > 0]


def collectives(s: Setting, load: Load) -> list[Term]:
    """All-reduces of tp, exchanges of an expert world wider than tp, context parallel exchanges, sends between stages."""
    shape, layout = s.shape, s.layout
    vector = load.tokens * shape.hidden * 2.0  # activations travel in bf16
    wide = layout.expert_world > layout.tp
    reduces = shape.layers + (shape.dense_layers if wide else shape.layers)
    terms = [_group(s, "all-reduce", layout.tp, reduces, vector / (1 if load.sequences else layout.pcp))]
    if wide and shape.experts:
        tokens = load.tokens * layout.dp * shape.hidden * 2.0
        if layout.ep > 1:  # all-to-all where a token visits fewer GPUs than there are
            tokens *= min(1.0, shape.experts.per_token / layout.expert_world)
        terms.append(_group(s, "expert exchange", layout.expert_world, 2 * shape.moe_layers, tokens / 2))
    attention = [group for group in shape.attention if group.entry and group.ratio]
    if layout.dcp > 1 and load.sequences:
        work = max((group.work for group in attention), default=0)
        size = load.tokens * work / layout.tp * layout.dcp * 2.0
        terms.append(_group(s, "dcp exchange", layout.dcp, 2 * sum(g.layers for g in attention), size / 2))
    if layout.pcp > 1:
        entry = max((group.entry for group in attention), default=0)
        size = (load.tokens if not load.sequences else load.tokens * 2) * max(entry, 1) * 2.0
        terms.append(_group(s, "pcp exchange", layout.tp * layout.pcp, shape.layers, size / 2))
    terms += [_sends(s, vector)] if layout.pp > 1 else []
    return terms


def _group(s: Setting, name: str, size: int, count: int, message_bytes: float) -> Term:
    """`count` all-reduces (or gather and scatter pairs of the same bytes) of a message over `size` neighbouring GPUs.

    Ring inside the link domain, and between domains each GPU sends its share of the message over its own card.
    """
    hardware, co = s.hardware, s.co
    if size == 1 or count == 0:
        return Term(name, 0.0, "guessed")
    inside = min(size, hardware.link_domain)
    domains = math.ceil(size / hardware.link_domain)
    seconds = (
        2 * (inside - 1) / inside * message_bytes / (hardware.link_bytes_per_s * co.link_share) + co.link_latency_s
    )
    if domains > 1:
        share = message_bytes / inside
        seconds += (
            2 * (domains - 1) / domains * share / (hardware.node_link_bytes_per_s * co.link_share) + co.node_latency_s
        )
    return Term(f"{name}, {'between nodes' if domains > 1 else 'in node'}", count * seconds, co.tag("link_latency_s"))


def _sends(s: Setting, vector_bytes: float) -> Term:
    layout, hardware, co = s.layout, s.hardware, s.co
    between = layout.gpus_per_server > hardware.link_domain
    rate = hardware.node_link_bytes_per_s if between else hardware.link_bytes_per_s
    each = vector_bytes / layout.tp / (rate * co.link_share) + (co.node_latency_s if between else co.link_latency_s)
    return Term("pipeline sends", (layout.pp - 1) * each, co.tag("link_latency_s"))
