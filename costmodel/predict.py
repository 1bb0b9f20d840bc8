"""Prices a layout for a traffic: passes into tokens a second, time to first token, memory and the term that binds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tideforge.costmodel.memory import Limits, Memory, kv_slots, memory_of
from tideforge.costmodel.passes import Load, Setting, Term, Work, price, work


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a profile says of the load. `users` are requests in flight, all servers together. `prompt_tokens` and
    `output_tokens` are means; `prompts` says how prompts spread around theirs, and `decode_context` where decoding happens,
    which is mostly behind long prompts and in long answers."""

    prompt_tokens: float
    output_tokens: float
    users: float
    longest_tokens: float = 0.0  # prompt and output that must fit, e.g. a high quantile; 0: the mean
    source: str = "given"
    prompts: tuple[tuple[float, float], ...] = ()  # share of the requests, tokens; (): all are alike
    decode_context: float = 0.0  # mean over decoded tokens; 0: of a request of mean lengths

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or self.users <= 0:
            raise ValueError("traffic: at least one prompt token, one output token and some user")

    @property
    def context(self) -> float:
        """Mean context of a decoding sequence."""
        return self.decode_context or self.prompt_tokens + self.output_tokens / 2

    @property
    def full(self) -> float:
        return self.prompt_tokens + self.output_tokens


@dataclasses.dataclass(frozen=True)
class Prediction:
    """`terms` are seconds a finished request of the whole deployment: they add up to 1 / requests per second."""

    output_tokens_per_s: float
    gpus: int
    tokens_per_s_per_user: float
    ttft_ms: float
    tpot_ms: float
    queue_ms: float
    slots: float  # sequences that fit at a time, all ranks together
    memory: Memory
    terms: tuple[Term, ...]

    @property
    def output_tokens_per_s_per_gpu(self) -> float:
        return self.output_tokens_per_s / self.gpus

    @property
    def binding(self) -> Term:
        return max(self.terms, key=lambda term: term.seconds)

    @property
    def request_s(self) -> float:
        return sum(term.seconds for term in self.terms)


@dataclasses.dataclass(frozen=True)
class Passes:
    """What a round of a closed load is made of: each of `batch` requests a rank gets its prompt and its steps."""

    decode_load: Load
    prefill_loads: tuple[tuple[float, Load], ...]  # share of the prompts, their pass
    decode_steps: float
    prompts: float  # that come in during one request, its own among them
    batch: float  # requests in flight a rank
    waiting: float  # users a rank
    ranks: float  # that have anything to do
    slots: float  # sequences that fit a rank
    setting: Setting
    tokens_a_round: float  # output tokens of all ranks, a GPU

    @property
    def decode(self) -> Work:
        return work(self.setting, self.decode_load)

    @property
    def prefill(self) -> Work:
        """Where all prompts are alike."""
        ((_, load),) = self.prefill_loads
        return work(self.setting, load)


def passes_of(s: Setting, traffic: Traffic, limits: Limits, memory: Memory | None = None) -> Passes:
    layout = s.layout
    memory = memory or memory_of(layout, s.shape, s.hardware, s.precision, limits, s.co)
    slots = max(1.0, min(kv_slots(layout, s.shape, s.precision, limits, memory, traffic.full), limits.max_num_seqs))
    ranks = min(layout.ranks, traffic.users)
    waiting = max(1.0, traffic.users / layout.ranks)
    batch = min(waiting, slots)
    return Passes(
        decode_load=Load.decode(max(1.0, batch / layout.pp), traffic.context),
        prefill_loads=tuple(
            (share, Load.prefill(tokens)) for share, tokens in traffic.prompts or ((1.0, traffic.prompt_tokens),)
        ),
        decode_steps=max(traffic.output_tokens - 1, 0.0),
        prompts=1 + (batch - 1) / layout.pp,
        batch=batch,
        waiting=waiting,
        ranks=ranks,
        slots=slots,
        setting=s,
        tokens_a_round=batch * ranks * traffic.output_tokens / layout.gpus,
    )


def mean_terms(parts: Sequence[tuple[float, Sequence[Term]]]) -> list[Term]:
    """Of passes that each make up a share."""
    found: dict[str, Term] = {}
    for share, terms in parts:
        for term in terms:
            before = found[term.name].seconds if term.name in found else 0.0
            found[term.name] = dataclasses.replace(term, seconds=before + share * term.seconds)
    return list(found.values())


def predict(s: Setting, traffic: Traffic, limits: Limits) -> Prediction:
    """A closed load: every user asks again at once. Users beyond the KV slots wait and do not slow the others down.

    Expects a layout that fits (at least one slot); see rank.unfit.
    """
    layout = s.layout
    memory = memory_of(layout, s.shape, s.hardware, s.precision, limits, s.co)
    p = passes_of(s, traffic, limits, memory)
    decode, prefill = price(s, p.decode_load), mean_terms([(share, price(s, load)) for share, load in p.prefill_loads])
    step_s, prompt_s = (sum(term.seconds for term in terms) for terms in (decode, prefill))
    # one user's request: its own prompt, its steps, and the prompts of the others that come in between
    served_s = p.prompts * prompt_s + p.decode_steps * step_s
    queue_s = served_s * (p.waiting / p.batch - 1)
    busy = min(0.9, p.prompts * prompt_s / served_s)
    others_s = (p.prompts - 1) * prompt_s
    ttft_s = prompt_s + step_s / 2 + min(others_s, prompt_s * busy / (2 * (1 - busy))) + queue_s
    per_request = 1 / (p.batch * p.ranks)
    terms = [term.times(p.decode_steps * per_request, "decode: ") for term in decode]
    terms += [term.times(p.prompts * per_request, "prefill: ") for term in prefill]
    per_token_s = step_s + (others_s / p.decode_steps if p.decode_steps else 0.0)
    return Prediction(
        output_tokens_per_s=p.batch * p.ranks * traffic.output_tokens / served_s,
        gpus=layout.gpus,
        tokens_per_s_per_user=traffic.output_tokens / (served_s + queue_s),
        ttft_ms=ttft_s * 1e3,
        tpot_ms=per_token_s * 1e3,
        queue_ms=queue_s * 1e3,
        slots=p.slots * layout.ranks,
        memory=memory,
        terms=tuple(term for term in terms if term.seconds > 0),
    )
