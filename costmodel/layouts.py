"""Layouts: how a model is spread over GPUs, every way to do it, and what each engine refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tideforge.costmodel.shapes import ModelShape


@dataclasses.dataclass(frozen=True, order=True)
class Layout:
    """`tp` splits heads and matrices, `ep` is the size of an expert group (1: experts are split by tp), `dp` counts ranks
    with requests of their own, `dcp` splits the KV cache of a tp group by position, `pcp` splits a prompt, `pp` splits
    layers. `replicas` are servers of their own behind a router. tp is the attention's: an engine's flag may differ.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    dcp: int = 1
    pcp: int = 1
    pp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1:
            raise ValueError(f"every size of a layout is at least 1, got {self}")

    @property
    def gpus_per_server(self) -> int:
        return self.tp * self.dp * self.pcp * self.pp

    @property
    def gpus(self) -> int:
        return self.gpus_per_server * self.replicas

    @property
    def ranks(self) -> int:
        """Schedulers with a batch of their own."""
        return self.dp * self.replicas

    @property
    def expert_world(self) -> int:
        """GPUs that hold the experts of one layer together."""
        return self.tp * self.dp * self.pcp

    @property
    def moe_tp(self) -> int:
        """How many GPUs split one expert."""
        return self.expert_world // self.ep

    def __str__(self) -> str:
        sizes = {name: size for name, size in dataclasses.asdict(self).items() if name != "replicas" and size > 1}
        text = " ".join(f"{name}{size}" for name, size in sizes.items()) or "tp1"
        return f"{self.replicas} x ({text})" if self.replicas > 1 else text


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`kind` groups refusals of one cause, `reason` names the figures."""

    kind: str
    reason: str


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def enumerate_layouts(gpus: int, experts: bool = True) -> Iterator[Layout]:
    """Every split of exactly `gpus` GPUs. Dense models get expert groups only on the widest tp, to name the refusal."""
    for replicas in divisors(gpus):
        for pp in divisors(gpus // replicas):
            for pcp in divisors(gpus // replicas // pp):
                for dp in divisors(gpus // replicas // pp // pcp):
                    tp = gpus // replicas // pp // pcp // dp
                    groups = divisors(tp * dp * pcp) if experts or tp == gpus else [1]
                    for ep in groups:
                        yield from (Layout(tp, ep, dp, dcp, pcp, pp, replicas) for dcp in divisors(tp))


def refusal(layout: Layout, shape: ModelShape, engine: str) -> Refusal | None:
    """Why this engine does not run the layout; None when it does. Memory is looked at elsewhere."""
    for rule in (_ENGINES[engine], _attention, _experts, _widths, _depth):
        found = rule(layout, shape)
        if found:
            return found
    return None


def _attention(layout: Layout, shape: ModelShape) -> Refusal | None:
    if shape.heads % layout.tp:
        return Refusal("heads", f"{shape.heads} attention heads do not divide by tp {layout.tp}")
    if not shape.latent and shape.kv_heads % layout.tp and layout.tp % shape.kv_heads:
        return Refusal("heads", f"{shape.kv_heads} KV heads neither divide by tp {layout.tp} nor divide it")
    if layout.tp % layout.dcp:
        return Refusal("dcp", f"tp {layout.tp} does not divide by dcp {layout.dcp}")
    most = max(1, layout.tp // shape.kv_heads)
    if layout.dcp > most:
        kept = "latent attention counts as 1 KV head" if shape.latent else f"{shape.kv_heads} KV heads"
        return Refusal("dcp", f"dcp {layout.dcp} is above tp / KV heads = {most} ({kept})")
    return None


def _experts(layout: Layout, shape: ModelShape) -> Refusal | None:
    if layout.ep == 1:
        return None
    if shape.experts is None:
        return Refusal("no experts", f"ep {layout.ep} without experts: {shape.name} is dense")
    if layout.ep > shape.experts.routed or shape.experts.routed % layout.ep:
        return Refusal("experts", f"{shape.experts.routed} experts do not spread evenly over ep {layout.ep}")
    return None


def _widths(layout: Layout, shape: ModelShape) -> Refusal | None:
    checks = [("dense layer", shape.ffn, layout.tp)] if shape.dense_layers else []
    if shape.experts:
        checks.append(("expert", shape.experts.width, layout.moe_tp))
    for what, width, parts in checks:
        if width % parts:
            return Refusal("width", f"{what} width {width} does not divide by {parts}")
        if shape.weight_block and parts > 1 and (width // parts) % shape.weight_block:
            cut = f"{what} width {width} / {parts} = {width // parts}"
            return Refusal("width", f"{cut} cuts the checkpoint's quantisation blocks of {shape.weight_block}")
    return None


def _depth(layout: Layout, shape: ModelShape) -> Refusal | None:
    if layout.pp > shape.layers:
        return Refusal("pp", f"pp {layout.pp} is above the {shape.layers} layers")
    return None


def _vllm(layout: Layout, shape: ModelShape) -> Refusal | None:
    if layout.ep not in (1, layout.expert_world):
        return Refusal("engine", f"vLLM's expert group is tp x dp x pcp = {layout.expert_world}, not {layout.ep}")
    return _same_as_dp(layout, shape)


def _same_as_dp(layout: Layout, shape: ModelShape) -> Refusal | None:
    """Data parallel ranks of a dense model share nothing, so one server with dp does what replicas would."""
    if shape.experts is None and layout.replicas > 1:
        return Refusal("duplicate", f"the same as dp {layout.ranks} in one server: {shape.name} is dense")
    return None


def _sglang(layout: Layout, shape: ModelShape) -> Refusal | None:
    if layout.dcp > 1 or layout.pcp > 1:
        return Refusal("engine", "context parallel layouts are not written for SGLang here")
    if layout.dp > 1 and shape.experts is None and layout.pp > 1:
        return Refusal("engine", "SGLang's dp of a dense model does not combine with pp here")
    return _same_as_dp(layout, shape)


def _trtllm(layout: Layout, shape: ModelShape) -> Refusal | None:
    if layout.dcp > 1 or layout.pcp > 1:
        return Refusal("engine", "context parallel layouts (Helix) are not written for TensorRT-LLM here")
    if layout.dp > 1 and layout.tp > 1:
        return Refusal(
            "engine", "TensorRT-LLM's attention data parallelism takes the whole tp group: dp = tp_size, attention tp 1"
        )
    if layout.dp > 1 and shape.experts is None:
        return Refusal(
            "duplicate", f"attention data parallelism of a dense model: {shape.name} runs as replicas instead"
        )
    return None


def _tideforge(layout: Layout, shape: ModelShape) -> Refusal | None:
    if layout.gpus_per_server > 1:
        return Refusal("engine", "tideforge serve runs a model on one device: only replicas use more")
    return None


_ENGINES: dict[str, Callable[[Layout, ModelShape], Refusal | None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "tideforge": _tideforge,
}
