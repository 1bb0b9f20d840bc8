"""Loads: who asks when. Closed (users who wait for their answer and think) or open (arrivals), of single requests or conversations.

The clock is the authority's. A turn's time to first token counts from when its user sent it, be the engine busy or not; the
text that it adds was drawn from a secret seed. Its prompt is all of the conversation: the last prompt, the tokens that were
answered, and what the user adds; so turns share prefixes, and the prefix cache is on.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence

from tideforge.data.workload import RequestShape
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.measure import Answer, Block, Interval, Side, interval, percentile, user_tps
from tideforge.engine.scheduler import Request, TokenEvent

Spans = tuple[tuple[int, ...], ...]  # of one conversation: what its user adds at each turn


@dataclasses.dataclass(frozen=True)
class Closed:
    """`users` at once. Each holds one conversation after the other until none is left; arrivals do not count.

    Time runs `pace` times as fast as the conversations say. All prompts of a block begin with the same `shared_tokens` tokens.
    Between two conversations a user thinks for `think_s`.
    """

    users: int
    conversations: tuple[RequestShape, ...]
    pace: float = 1.0
    shared_tokens: int = 0
    think_s: float = 0.0

    def begins_s(self, conversation: int) -> float | None:
        """When it begins; None: when a user is free."""
        return 0.0 if conversation < self.users else None


@dataclasses.dataclass(frozen=True)
class Open:
    """Each conversation begins at its `arrival_s`, whatever the engine has to do then. `pace`, `shared_tokens` as of Closed."""

    conversations: tuple[RequestShape, ...]
    pace: float = 1.0
    shared_tokens: int = 0

    def begins_s(self, conversation: int) -> float | None:
        return self.conversations[conversation].arrival_s / self.pace


Load = Closed | Open


def shares_prefixes(load: Load) -> bool:
    return load.shared_tokens > 0 or any(shape.turns for shape in load.conversations)


def core_for(settings: Settings, load: Load) -> EngineCore:
    """A scheduler and pool for one side of `load`: with a prefix cache where its prompts share prefixes."""
    pool = BlockPool(settings.num_blocks, settings.block_size, prefix_cache=shares_prefixes(load))
    return EngineCore(settings.limits, pool)


def fitting(shape: RequestShape, max_model_len: int) -> RequestShape:
    """The conversation without the turns that would outgrow the context; a load's shared tokens come on top."""
    turns = list(shape.turns)
    while turns and dataclasses.replace(shape, turns=tuple(turns)).context_tokens > max_model_len:
        turns.pop()
    return dataclasses.replace(shape, turns=tuple(turns))


def draw_script(load: Load, corpus: Sequence[int], secret: int) -> tuple[Spans, ...]:
    """What each conversation's user says at each turn: spans of real text, unpredictable without `secret`."""
    rng = random.Random(secret)

    def span(tokens: int) -> tuple[int, ...]:
        if len(corpus) <= tokens:
            raise ValueError("the corpus is shorter than the longest prompt")
        start = rng.randrange(len(corpus) - tokens)
        return tuple(corpus[start : start + tokens])

    shared = span(load.shared_tokens)
    return tuple(
        (shared + span(shape.prompt_tokens), *(span(turn.new_tokens) for turn in shape.turns))
        for shape in load.conversations
    )


@dataclasses.dataclass(frozen=True)
class Reply:
    """One turn, answered. `sent_s` counts from the start of the load, the answer's times from `sent_s`."""

    conversation: int
    turn: int
    sent_s: float
    answer: Answer
    cached_tokens: int  # of the prompt, found in the prefix cache

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between one token and the next."""
        return tuple(b - a for a, b in itertools.pairwise(self.answer.times_s))

    @property
    def finish_s(self) -> float:
        return self.sent_s + self.answer.times_s[-1]


@dataclasses.dataclass(frozen=True)
class LoadBlock:
    """One replay of a load on one forward."""

    seconds: float
    replies: tuple[Reply, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        return tuple(reply.answer for reply in self.replies)

    @property
    def block(self) -> Block:
        return Block(self.seconds, self.answers)

    def ttft_s(self, share: float) -> float:
        """Seconds to the first token that `share` of the requests needed at most."""
        return percentile([answer.ttft_s for answer in self.answers], share)

    @property
    def user_tps_p90(self) -> float:
        """90 % of the requests got their tokens at least that fast, first token excluded."""
        return user_tps([self.block])[1]

    @property
    def output_tps(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds

    @property
    def total_tps(self) -> float:
        """Prompt and output tokens a second, those from the prefix cache included."""
        return sum(len(answer.prompt) + len(answer.tokens) for answer in self.answers) / self.seconds


def run_load(side: Side, load: Load, script: Sequence[Spans]) -> LoadBlock:
    """Replays the load until all is answered. Raises what the executor raises."""
    if shares_prefixes(load) and not side.core.pool.prefix_cache:
        raise ValueError("the load's prompts share prefixes, but the core has no prefix cache: make it with core_for")
    play = _Play(side, load, script)
    while play.open:
        play.step()
    return LoadBlock(play.now_s, tuple(play.replies))


@dataclasses.dataclass
class _Turn:
    """A turn under way."""

    conversation: int
    number: int
    prompt: tuple[int, ...]
    sent_s: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)


class _Play:
    """One load on one side. `_due` holds the turns that will be sent, the next one first."""

    def __init__(self, side: Side, load: Load, script: Sequence[Spans]) -> None:
        self.side, self.load, self.script = side, load, script
        self.replies: list[Reply] = []
        self._due: list[tuple[float, int, _Turn]] = []
        self._flying: dict[str, _Turn] = {}
        self._unbegun: deque[int] = deque()  # until a user is free
        for conversation in range(len(load.conversations)):
            begins_s = load.begins_s(conversation)
            if begins_s is None:
                self._unbegun.append(conversation)
            else:
                self._send_at(begins_s, _Turn(conversation, 0, script[conversation][0], begins_s))
        self._begin = time.perf_counter()

    @property
    def open(self) -> bool:
        return bool(self._due or self._flying)

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._begin

    def _send_at(self, when_s: float, turn: _Turn) -> None:
        heapq.heappush(self._due, (when_s, turn.conversation, turn))

    def step(self) -> None:
        if not self._flying:
            time.sleep(max(0.0, self._due[0][0] - self.now_s))
        while self._due and self._due[0][0] <= self.now_s:
            self._send(heapq.heappop(self._due)[2])
        for event in self.side.core.step():
            self._take(event, self.now_s)

    def _send(self, turn: _Turn) -> None:
        shape = self.load.conversations[turn.conversation]
        output = shape.turns[turn.number - 1].output_tokens if turn.number else shape.output_tokens
        name = f"{turn.conversation}-{turn.number}"
        self.side.core.add(Request(name, turn.prompt, output, forward=self.side.forward))
        self._flying[name] = turn

    def _take(self, event: TokenEvent, now_s: float) -> None:
        turn = self._flying[event.request_id]
        turn.tokens.append(event.token)
        turn.times_s.append(now_s - turn.sent_s)
        if event.finish is not None:
            del self._flying[event.request_id]
            answer = Answer(turn.prompt, tuple(turn.tokens), tuple(turn.times_s))
            self.replies.append(Reply(turn.conversation, turn.number, turn.sent_s, answer, event.cached_tokens))
            self._go_on(turn, now_s)

    def _go_on(self, turn: _Turn, now_s: float) -> None:
        """The conversation's next turn, after some thought; or its user's next conversation."""
        later, number = self.load.conversations[turn.conversation].turns, turn.number + 1
        if turn.number < len(later):
            when_s = now_s + later[turn.number].think_s / self.load.pace
            prompt = turn.prompt + tuple(turn.tokens) + self.script[turn.conversation][number]
            self._send_at(when_s, _Turn(turn.conversation, number, prompt, when_s))
        elif self._unbegun:
            assert isinstance(self.load, Closed)
            conversation, when_s = self._unbegun.popleft(), now_s + self.load.think_s
            self._send_at(when_s, _Turn(conversation, 0, self.script[conversation][0], when_s))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """b beside a under one load. Ratios above 1 speak for b: of a's seconds over b's, of b's tokens/s over a's."""

    ttft_p50: Interval
    ttft_p90: Interval
    user_tps_p90: Interval | None  # None where that many answers have one token only
    output_tps: Interval
    blocks: tuple[tuple[LoadBlock, LoadBlock], ...]  # a's and b's of each pair


def replays(a: Side, b: Side, load: Load, corpus: Sequence[int]) -> Iterator[tuple[LoadBlock, LoadBlock]]:
    """Pairs of whole replays without end, in turn: A B then B A, or the other way round.

    Both of a pair get the same arrivals, think times and text, drawn when the pair begins; the next pair gets fresh text, so
    no prefix is left from the last one. An open load is busy in bursts, and sides that run beside each other would share the
    device: hence whole replays, not step by step as `measure.lockstep`. Raises what the executors raise.
    """
    first = secrets.randbelow(2)
    for number in itertools.count():
        script = draw_script(load, corpus, secrets.randbits(64))
        order = (a, b) if number % 2 == first else (b, a)
        found = {id(side): run_load(side, load, script) for side in order}
        yield found[id(a)], found[id(b)]


def measure_load(
    a: Side, b: Side, load: Load, corpus: Sequence[int], pairs: int, most_s: float = math.inf
) -> Comparison:
    """Whole replays in turn, until there are so many pairs, or `most_s` are over. Raises what the executors raise."""
    blocks, end = [], time.monotonic() + most_s
    for pair in itertools.islice(replays(a, b, load, corpus), pairs):
        blocks.append(pair)
        if time.monotonic() > end:
            break
    return compare(blocks)


def compare(blocks: Sequence[tuple[LoadBlock, LoadBlock]]) -> Comparison:
    """Intervals over pairs, of the geometric mean of their ratios."""
    rates = [(a.user_tps_p90, b.user_tps_p90) for a, b in blocks]
    return Comparison(
        ttft_p50=interval([a.ttft_s(0.5) / b.ttft_s(0.5) for a, b in blocks]),
        ttft_p90=interval([a.ttft_s(0.9) / b.ttft_s(0.9) for a, b in blocks]),
        user_tps_p90=interval([b / a for a, b in rates]) if all(map(math.isfinite, sum(rates, ()))) else None,
        output_tps=interval([b.output_tps / a.output_tps for a, b in blocks]),
        blocks=tuple(blocks),
    )
