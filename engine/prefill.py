"""How long a prompt takes until its first token, by its length: single requests through the engine, chunk by chunk.

Few layers are enough to see what grows with the context, and keep the pages of the longest prompt small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tideforge.data.workload import RequestShape
from tideforge.engine import check
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Settings, bucket
from tideforge.engine.core import EngineCore
from tideforge.engine.lab import Lab
from tideforge.engine.measure import Answer, Interval, Side, interval, run_block
from tideforge.errors import UserError

if TYPE_CHECKING:
    from tideforge.engine.executor import RemoteExecutor
    from tideforge.engine.forward import Forward
    from tideforge.engine.memory import Arena
    from tideforge.engine.reference import Reference

SPAN = 1024  # tokens of text in a row: a prompt may be longer than the corpus
CHECKED = 4096  # longest prompt that the reference takes on: it holds heads * tokens ** 2 logits of attention
MOST_CAPTURED = 2048  # tokens of a step in a graph; a longer one keeps the device busy while the host launches


@dataclasses.dataclass(frozen=True)
class PrefillTime:
    """One forward at one prompt length; times of one index are of the same prompt on every forward."""

    forward: str
    context: int  # tokens of the prompt
    depth: int  # layers
    times_s: tuple[float, ...]  # to the first token
    gap: (
        float | None
    )  # worst token's distance to the reference's maximum, in logits; None: the prompt is too long for it

    @property
    def ttft_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def tokens_per_s(self) -> float:
        return self.context / self.ttft_s


def ttft_ratio(a: PrefillTime, b: PrefillTime) -> Interval:
    """a's seconds over b's, prompt by prompt: above 1 b is sooner."""
    return interval([x / y for x, y in zip(a.times_s, b.times_s, strict=True)])


def contexts_up_to(longest: int, least: int = 512) -> tuple[int, ...]:
    """Doubling from `least`, and `longest` itself: of a profile, the P99 of its contexts."""
    powers = (least << shift for shift in range(max(1, longest // least).bit_length()))
    return (*(context for context in powers if context < longest), longest)


def sized_for(settings: Settings, longest: int) -> Settings:
    """One request at a time, up to so many tokens and one more; graphs of its chunks where the settings ask for graphs."""
    tokens = longest + 1
    limits = dataclasses.replace(settings.limits, max_num_seqs=1, max_model_len=tokens)
    captured = [size for size in settings.capture_tokens if size <= min(MOST_CAPTURED, limits.max_num_batched_tokens)]
    return dataclasses.replace(
        settings, limits=limits, num_blocks=-(-tokens // settings.block_size) + 1,
        capture_rows=(1,) if settings.capture_rows else (), capture_tokens=tuple(captured),
        capture_contexts=(bucket(tokens),) if settings.capture_rows else (),
    )  # fmt: skip


def draw_context(corpus: Sequence[int], tokens: int, secret: int) -> tuple[int, ...]:
    """Spans of real text one after the other, unpredictable without `secret`."""
    rng, most = random.Random(secret), min(SPAN, len(corpus))
    drawn: list[int] = []
    while len(drawn) < tokens:
        start = rng.randrange(len(corpus) - most + 1)
        drawn += corpus[start : start + min(most, tokens - len(drawn))]
    return tuple(drawn)


def prefill_times(
    lab: Lab,
    forwards: Sequence[Forward],
    contexts: Sequence[int],
    depth: int,
    corpus: Sequence[int],
    reference: Reference | None = None,
    repeats: int = 5,
) -> list[PrefillTime]:
    """Times each of `forwards` in a fresh worker, at the first `depth` layers, under the lab's settings made for long prompts.

    Each repeat is a fresh prompt, given to all forwards in turn, the order turned round every time. Logits must be finite;
    prompts that the reference can take on must be answered right. Raises UserError for a depth that the model does not have
    and CandidateError with what a forward did.
    """
    if not 1 <= depth <= lab.config.num_hidden_layers:
        raise UserError("depth", f"is {depth}, the model has {lab.config.num_hidden_layers} layers", "take one of them")
    inner = Lab(sized_for(lab.settings, max(contexts)), lab.events)
    inner.layout = dataclasses.replace(inner.layout, num_layers=depth)  # pages of the other layers would lie empty
    inner.trusted_kernels = lab.trusted_kernels
    names = [f"prefill-{index}" for index in range(len(forwards))]
    with contextlib.closing(inner):
        try:
            lanes = [_Lane(inner, forward, name, depth) for forward, name in zip(forwards, names, strict=True)]
            bench = _Bench(inner, lanes, depth, corpus, reference, repeats)
            return [record for context in contexts for record in bench.at(context)]
        finally:
            for name in names:
                inner.ask_keeper({"type": "drop", "name": name})


class _Lane:
    """One forward in its worker."""

    def __init__(self, lab: Lab, forward: Forward, name: str, depth: int) -> None:
        self.lab, self.forward = lab, forward
        self.arena: Arena = lab.arena(name)
        self.worker: RemoteExecutor = lab.spawn(forward, self.arena, range(depth))

    def warm(self, prompt: tuple[int, ...]) -> None:
        self.answer(prompt)  # kernels are compiled now
        self.lab.capture(self.worker)

    def answer(self, prompt: tuple[int, ...]) -> Answer:
        settings = self.lab.settings
        core = EngineCore(settings.limits, BlockPool(settings.num_blocks, settings.block_size, prefix_cache=False))
        side = Side.of(self.forward.id, core, self.worker)
        block = run_block(side.core, side.forward, [RequestShape(len(prompt), 1)], [prompt], 1)
        check.require_finite(self.arena.logits(1))
        return block.answers[0]


class _Bench:
    def __init__(
        self, lab: Lab, lanes: Sequence[_Lane], depth: int, corpus: Sequence[int], reference: Reference | None,
        repeats: int,
    ) -> None:  # fmt: skip
        self.lab, self.lanes, self.depth, self.corpus, self.repeats = lab, lanes, depth, corpus, repeats
        self.reference = reference
        dtype, layers = lab.settings.dtype, range(depth)
        self.bound = reference.bound(dtype, corpus, layers) if reference else 0.0
        for lane in lanes:
            lane.warm(draw_context(corpus, lab.settings.limits.max_model_len // 2, 0))

    def at(self, context: int) -> list[PrefillTime]:
        """The first prompt is not timed: steps of these shapes may be new to the worker."""
        answers: list[list[Answer]] = [[] for _ in self.lanes]
        with self.lab.clock():
            for repeat in range(self.repeats + 1):
                prompt = draw_context(self.corpus, context, secrets.randbits(64))
                places = list(range(len(self.lanes)))
                for place in places[::-1] if repeat % 2 else places:
                    answers[place].append(self.lanes[place].answer(prompt))
        return [
            PrefillTime(
                lane.forward.id, context, self.depth, tuple(a.ttft_s for a in mine[1:]), self._gap(mine[-1]),
            )
            for lane, mine in zip(self.lanes, answers, strict=True)
        ]  # fmt: skip

    def _gap(self, answer: Answer) -> float | None:
        """Raises CandidateError("wrong") when it is above the bound."""
        if self.reference is None or len(answer.prompt) > CHECKED:
            return None
        return check.require_right(self.reference, [answer], range(self.depth), self.bound).gap
