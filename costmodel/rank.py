"""Ranks every layout of a model on given hardware for given traffic; refuses the others with a reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tideforge.costmodel import launch as launching
from tideforge.costmodel.coefficients import FITTED_ON, TIE, TYPICAL_ERROR, UNCERTAINTY, Coefficients
from tideforge.costmodel.hardware import Hardware
from tideforge.costmodel.launch import LaunchCommand
from tideforge.costmodel.layouts import Layout, Refusal, enumerate_layouts, refusal
from tideforge.costmodel.memory import GIB, Limits, Precision, kv_slots, memory_of
from tideforge.costmodel.misspelt import not_understood
from tideforge.costmodel.options import limits_of, precision_of
from tideforge.costmodel.passes import Setting
from tideforge.costmodel.predict import Prediction, Traffic, predict
from tideforge.costmodel.shapes import ModelShape
from tideforge.errors import UserError

OBJECTIVES = ("output_tps", "tps_per_user_p90", "ttft", "cost")


@dataclasses.dataclass(frozen=True)
class Question:
    """What is ranked. `maximize` is one of OBJECTIVES; limits are in ms and None where there is none."""

    command: LaunchCommand
    shape: ModelShape
    hardware: Hardware
    gpus: int
    nodes: int
    traffic: Traffic
    maximize: str = "output_tps"
    ttft_limit_ms: float | None = None
    tpot_limit_ms: float | None = None
    precision: Precision | None = None  # None: from the launch command and the checkpoint
    co: Coefficients = Coefficients()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if self.maximize not in OBJECTIVES:
            raise UserError(f"objective {self.maximize!r}", "is unknown", f"choose one of {', '.join(OBJECTIVES)}")
        if self.gpus < 1 or self.nodes < 1 or self.gpus % self.nodes:
            raise UserError(
                "--gpus", f"{self.gpus} GPUs do not spread evenly over {self.nodes} nodes", "mend --gpus or --nodes"
            )
        most = max(self.hardware.gpus_per_node, self.hardware.link_domain)
        if self.gpus // self.nodes > most:
            many = f"{self.gpus // self.nodes} a node, {self.hardware.name} has {most}"
            raise UserError("--gpus", many, f"give --nodes {math.ceil(self.gpus / most)} or fewer GPUs")


@dataclasses.dataclass(frozen=True)
class Ranked:
    """One legal layout. `tied`: not told apart from the first one. `broken`: limits that the prediction does not keep."""

    layout: Layout
    prediction: Prediction
    command: str
    instructions: tuple[str, ...]
    current: bool
    broken: tuple[str, ...] = ()
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Rejected:
    layout: Layout
    kind: str
    reason: str
    current: bool


@dataclasses.dataclass(frozen=True)
class Ranking:
    question: Question
    precision: Precision
    limits: Limits
    ranked: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...]

    @property
    def current(self) -> Ranked | None:
        return next((entry for entry in self.ranked if entry.current), None)


def rank(question: Question) -> Ranking:
    """Best first; layouts that break a limit come after all that keep them."""
    q = question
    precision, limits = q.precision or precision_of(q.command, q.shape), limits_of(q.command)
    hardware = _as_wired(q)
    now = _current(q)
    ranked, rejected = [], []
    for layout in enumerate_layouts(q.gpus, q.shape.experts is not None):
        setting = Setting(layout, q.shape, hardware, precision, q.co)
        found = refusal(layout, q.shape, q.command.engine) or unfit(setting, q.traffic, limits)
        if found:
            rejected.append(Rejected(layout, found.kind, found.reason, layout == now))
        else:
            ranked.append(_ranked(q, setting, limits, layout == now))
    ranked.sort(key=lambda entry: (len(entry.broken), -_worth(q.maximize, entry.prediction), entry.layout))
    return Ranking(q, precision, limits, tuple(_with_ties(q, ranked)), tuple(rejected), tuple(_notes(q, limits, now)))


def _as_wired(q: Question) -> Hardware:
    """The link domain is a node's GPUs that are in use, unless the link reaches beyond the node."""
    if q.hardware.link_domain > q.hardware.gpus_per_node:
        return q.hardware
    return dataclasses.replace(q.hardware, link_domain=min(q.hardware.link_domain, q.gpus // q.nodes))


def _current(q: Question) -> Layout:
    """The layout of the launch command; GPUs that one such server leaves over run further ones."""
    now = launching.layout_of(q.command)
    copies = q.gpus // now.gpus_per_server
    if copies > 1 and q.gpus % now.gpus_per_server == 0:
        dense_dp = q.shape.experts is None and q.command.engine in ("vllm", "sglang")
        changed = {"dp": now.dp * copies} if dense_dp else {"replicas": copies}
        return dataclasses.replace(now, **changed)
    return now


def unfit(s: Setting, traffic: Traffic, limits: Limits) -> Refusal | None:
    """Memory: the weights must fit, and the KV space must hold the longest request."""
    memory = memory_of(s.layout, s.shape, s.hardware, s.precision, limits, s.co)
    if memory.kv_bytes <= 0:
        return Refusal("memory", f"does not fit: {memory.text()}")
    longest = limits.max_model_len or max(traffic.longest_tokens, traffic.full)  # a server refuses what is longer
    slots = kv_slots(s.layout, s.shape, s.precision, limits, memory, longest)
    if slots < 1:
        space = f"{memory.kv_bytes / GIB:.1f} GiB" if limits.kv_tokens is None else f"{limits.kv_tokens} tokens"
        return Refusal(
            "memory", f"KV space of {space} holds {slots:.2f} of a request of {longest:.0f} tokens; {memory.text()}"
        )
    if limits.kv_tokens is not None:
        fixed = kv_slots(
            s.layout, s.shape, s.precision, dataclasses.replace(limits, kv_tokens=None), memory, limits.kv_tokens
        )
        if fixed < 1:
            return Refusal(
                "memory", f"the KV space asked for ({limits.kv_tokens} tokens) does not fit: {memory.text()}"
            )
    return None


def _ranked(q: Question, s: Setting, limits: Limits, current: bool) -> Ranked:
    prediction = predict(s, q.traffic, limits)
    command = q.command if current else launching.with_layout(q.command, s.layout, q.shape.experts is not None)
    said = launching.instructions(command, s.layout, q.nodes, q.gpus // q.nodes)
    broken = []
    for name, value, limit in (
        ("TTFT", prediction.ttft_ms, q.ttft_limit_ms),
        ("TPOT", prediction.tpot_ms, q.tpot_limit_ms),
    ):
        if limit is not None and value > limit:
            broken.append(f"{name} {value:.0f} ms is above {limit:.0f} ms")
    return Ranked(s.layout, prediction, str(command), said, current, tuple(broken))


def _worth(maximize: str, prediction: Prediction) -> float:
    """Larger is better. Every layout uses all GPUs, so cost a token falls as output tokens a second rise."""
    if maximize == "tps_per_user_p90":
        return prediction.tokens_per_s_per_user
    return -prediction.ttft_ms if maximize == "ttft" else prediction.output_tokens_per_s


def _with_ties(q: Question, ranked: Sequence[Ranked]) -> list[Ranked]:
    if not ranked:
        return []
    best = ranked[0]
    return [
        dataclasses.replace(
            entry, tied=entry.broken == best.broken and tie(q.maximize, best.prediction, entry.prediction)
        )
        for entry in ranked
    ]


def tie(maximize: str, best: Prediction, other: Prediction) -> bool:
    """Whether the gap is within measuring noise or within the uncertainty of the terms in which the two differ.

    An error in a term moves both layouts alike, so only differences count: a guess that two layouts share cancels out.
    """
    low, high = sorted((abs(_worth(maximize, best)), abs(_worth(maximize, other))))
    gap = high / low - 1  # of the time that a token takes
    seconds: dict[str, float] = {}
    tags: dict[str, str] = {}
    for sign, prediction in ((1, best), (-1, other)):
        for term in prediction.terms:
            seconds[term.name] = seconds.get(term.name, 0.0) + sign * term.seconds
            tags[term.name] = term.tag
    doubt = sum((UNCERTAINTY[tags[name]] * value) ** 2 for name, value in seconds.items()) ** 0.5 / best.request_s
    return gap <= max(TIE, doubt)


def _notes(q: Question, limits: Limits, now: Layout) -> list[str]:
    notes = [f"a roofline: {q.hardware.source}; nothing was measured on this machine"]
    if q.hardware.name in FITTED_ON:
        notes.append("efficiencies and latencies are fitted to public measurements of vLLM, SGLang and TensorRT-LLM")
    notes += [f"{q.shape.name}: {text}" for text in q.shape.assumed]
    if q.hardware.guessed:
        notes.append(f"guessed for {q.hardware.name}: {', '.join(q.hardware.guessed)}")
    if limits.max_model_len is None:
        notes.append(
            "the launch command sets no context limit: a server then wants room for the model's own, which may not fit"
        )
    if now.gpus != q.gpus:
        notes.append(f"the launch command uses {now.gpus} of {q.gpus} GPUs ({now}): it is not among the layouts")
    return notes


def to_dict(ranking: Ranking) -> dict[str, Any]:
    """Plain JSON: question, ranked and rejected layouts, every term with its tag."""
    q = ranking.question
    return {
        "engine": q.command.engine,
        "model": q.shape.name,
        "hardware": q.hardware.name,
        "gpus": q.gpus,
        "nodes": q.nodes,
        "maximize": q.maximize,
        "traffic": dataclasses.asdict(q.traffic),
        "precision": dataclasses.asdict(ranking.precision),
        "limits": dataclasses.asdict(ranking.limits),
        "typical_error": TYPICAL_ERROR,
        "not_understood": not_understood(q.command),
        "notes": list(ranking.notes),
        "ranked": [_entry(position, entry) for position, entry in enumerate(ranking.ranked, start=1)],
        "rejected": [
            {"layout": str(entry.layout), "kind": entry.kind, "reason": entry.reason, "current": entry.current}
            for entry in ranking.rejected
        ],
    }


def _entry(position: int, entry: Ranked) -> dict[str, Any]:
    p = entry.prediction
    return {
        "position": position,
        "layout": str(entry.layout),
        "sizes": dataclasses.asdict(entry.layout),
        "tied": entry.tied,
        "current": entry.current,
        "broken_limits": list(entry.broken),
        "output_tokens_per_s": p.output_tokens_per_s,
        "output_tokens_per_s_per_gpu": p.output_tokens_per_s_per_gpu,
        "tokens_per_s_per_user": p.tokens_per_s_per_user,
        "ttft_ms": p.ttft_ms,
        "tpot_ms": p.tpot_ms,
        "queue_ms": p.queue_ms,
        "kv_slots": p.slots,
        "memory_bytes": {**dataclasses.asdict(p.memory), "kv_bytes": p.memory.kv_bytes},
        "binding": p.binding.name,
        "terms": [dataclasses.asdict(term) for term in p.terms],
        "command": entry.command,
        "instructions": list(entry.instructions),
    }
