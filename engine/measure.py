"""The measuring protocol. The clock runs here, in the authority; a worker's own timers are never asked.

Reveal to answer: prompts are drawn from a secret seed when the clock starts, and it stops when the last answer token is
there. Paired and interleaved: each pair replays the same fresh prompts on incumbent and candidate, A B then B A.
"""

from __future__ import annotations

import dataclasses
import math
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tideforge.data.workload import RequestShape
from tideforge.engine.core import EngineCore
from tideforge.engine.outcome import Figures
from tideforge.engine.scheduler import Request
from tideforge.errors import CandidateError

if TYPE_CHECKING:
    from tideforge.engine.executor import Executor

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom (any statistics handbook).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


# One-sided 99 % quantiles of the same distribution.
_T99 = (
    31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718, 2.681, 2.650, 2.624, 2.602,
)  # fmt: skip


PRECISE = 0.01  # half-width of a ratio's interval at which a trial ends
HANG_S, HANG_FACTOR = 2.0, 20.0  # b hangs when it takes longer than the larger of both, seconds and times a's


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request's chain, with the seconds since the reveal at which each token arrived."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def tps(self) -> float:
        """Tokens/s that this user saw after the first token."""
        span = self.times_s[-1] - self.times_s[0]
        return (len(self.times_s) - 1) / span if span > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Block:
    """One timed replay of the workload on one forward."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def output_tps(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


@dataclasses.dataclass(frozen=True)
class Interval:
    """Geometric mean of paired ratios and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int


def draw_replay(
    part: Sequence[RequestShape], users: int, corpus: Sequence[int], secret: int
) -> tuple[list[RequestShape], list[tuple[int, ...]]]:
    """One request a user, drawn from a part of the workload, and its prompts: unpredictable without `secret`."""
    rng = random.Random(secret)
    shapes = rng.sample(list(part), users) if len(part) >= users else list(part)
    return shapes, draw_prompts(shapes, corpus, rng.getrandbits(64))


def brief(shapes: Sequence[RequestShape]) -> list[RequestShape]:
    """The same prompts with short answers, half of which end with each step: every batch size on the way down comes once."""
    return [
        dataclasses.replace(shape, output_tokens=min(shape.output_tokens, 2 + index.bit_length()))
        for index, shape in enumerate(shapes)
    ]


def draw_prompts(shapes: Sequence[RequestShape], corpus: Sequence[int], secret: int) -> list[tuple[int, ...]]:
    """A span of real text for each shape, unpredictable without `secret`."""
    rng = random.Random(secret)
    longest = max(shape.prompt_tokens for shape in shapes)
    if len(corpus) <= longest:
        raise ValueError("the corpus is shorter than the longest prompt")
    starts = [rng.randrange(len(corpus) - shape.prompt_tokens) for shape in shapes]
    return [tuple(corpus[at : at + shape.prompt_tokens]) for at, shape in zip(starts, shapes, strict=True)]


def run_block(
    core: EngineCore, forward: str, shapes: Sequence[RequestShape], prompts: Sequence[tuple[int, ...]], users: int
) -> Block:
    """Closed load: `users` requests in flight until all are answered. Raises what the executor raises."""
    waiting = [
        Request(id=str(i), prompt=prompt, max_tokens=shape.output_tokens, forward=forward)
        for i, (shape, prompt) in enumerate(zip(shapes, prompts, strict=True))
    ]
    waiting.reverse()
    tokens: list[list[int]] = [[] for _ in shapes]
    times: list[list[float]] = [[] for _ in shapes]
    in_flight, begin = 0, time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < users:
            core.add(waiting.pop())
            in_flight += 1
        events = core.step()
        now = time.perf_counter() - begin
        for event in events:
            tokens[int(event.request_id)].append(event.token)
            times[int(event.request_id)].append(now)
            in_flight -= event.finish is not None
    seconds = time.perf_counter() - begin
    answers = (Answer(p, tuple(t), tuple(s)) for p, t, s in zip(prompts, tokens, times, strict=True))
    return Block(seconds, tuple(answers))


@dataclasses.dataclass(frozen=True)
class Side:
    """One arm of a comparison: a forward's id and the engine core whose executor runs it."""

    forward: str
    core: EngineCore

    @classmethod
    def of(cls, forward: str, core: EngineCore, executor: Executor) -> Side:
        core.attach(forward, executor)
        return cls(forward, core)


def interval(ratios: Sequence[float]) -> Interval:
    """95 % interval of the geometric mean, by Student's t on the log ratios; one pair has no interval: (0, inf)."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(mean), 0.0, math.inf, len(logs))
    quantile = _T95[len(logs) - 2] if len(logs) - 1 <= len(_T95) else 1.96
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def ratio_of(measured: Sequence[tuple[Block, Block]]) -> Interval:
    """Output tokens/s of b over a, pair by pair."""
    return interval([b.output_tps / a.output_tps for a, b in measured])


def noise_of(log_ratios: Sequence[float]) -> tuple[float, float]:
    """(offset, floor) of log ratios of the incumbent against itself, each in a fresh worker; (0, 0) without any.

    The offset is what the incumbent's own worker is lastingly off by: all its trials share it. The floor is how far one more worker
    of equal source may lie from there: Student's prediction interval, s t sqrt(1 + 1/n), one-sided at 99 %, since a search looks at
    many candidates.
    """
    n = len(log_ratios)
    if n < 2:
        return 0.0, _T99[0] * sum(map(abs, log_ratios))
    spread = statistics.stdev(log_ratios) * math.sqrt(1 + 1 / n)
    return statistics.fmean(log_ratios), _T99[min(n - 1, len(_T99)) - 1] * spread


def with_noise_floor(found: Interval, log_ratios: Sequence[float]) -> Interval:
    """`found` beside the incumbent's worker that `log_ratios` are of: without its offset, and widened by the floor, since pairs of
    one worker pair show neither."""
    offset, floor = noise_of(log_ratios)
    off = math.exp(-offset)
    return _widened(Interval(found.ratio * off, found.low * off, found.high * off, found.pairs), floor)


def between_fresh_workers(found: Interval, log_ratios: Sequence[float]) -> Interval:
    """`found` beside another worker of the incumbent, whose offset nobody knows: two workers are off, not one, so the floor is
    s t sqrt(2) with the spread s of `log_ratios` about their mean."""
    n = len(log_ratios)
    return _widened(found, noise_of(log_ratios)[1] * (math.sqrt(2 / (1 + 1 / n)) if n > 1 else 1.0))


def _widened(found: Interval, floor: float) -> Interval:
    """Errors that have nothing to do with each other add as squares."""
    if floor == 0:
        return found
    low, high = (
        math.hypot(found.ratio - found.low, floor * found.ratio),
        math.hypot(found.high - found.ratio, floor * found.ratio),
    )
    return dataclasses.replace(found, low=found.ratio - low, high=found.ratio + high)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (numpy's default)."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def user_tps(blocks: Sequence[Block]) -> tuple[float, float]:
    """Tokens/s per user: the median, and P90 = 1 / P90 of latency per output token (90 % are at least that fast)."""
    rates = [answer.tps for block in blocks for answer in block.answers]
    return percentile(rates, 0.5), percentile(rates, 0.1)


def figures_of(ratio: Interval, blocks: Sequence[tuple[Block, Block]]) -> Figures:
    """What a passed trial reports: the ratio as found, and of the blocks (incumbent's, candidate's) rates and latencies."""
    ours = [block for _, block in blocks]
    p50, p90 = user_tps(ours)
    return Figures(
        ratio=ratio.ratio, ci_low=ratio.low, ci_high=ratio.high, pairs=ratio.pairs,
        candidate_tps=statistics.median(block.output_tps for block in ours),
        incumbent_tps=statistics.median(block.output_tps for block, _ in blocks),
        ttft_ms=1e3 * statistics.median(answer.ttft_s for block in ours for answer in block.answers),
        tps_per_user_p50=p50, tps_per_user_p90=p90,
    )  # fmt: skip


def lockstep(
    a: Side, b: Side, shapes: Sequence[RequestShape], prompts: Sequence[tuple[int, ...]]
) -> tuple[Block, Block, list[tuple[float, float]]]:
    """Replays the same prompts on both, step by step in turn (A B, B A, ... or the other way round), all users at once.

    Returns both blocks and the seconds of each step pair: neighbours in time, so that a machine's drift cancels. A block's
    clock counts its own steps only. Raises CandidateError("hung") once b has taken HANG_FACTOR times as long as a.
    """
    lanes = [_Lane(side, shapes, prompts) for side in (a, b)]
    pairs: list[tuple[float, float]] = []
    first = secrets.randbelow(2)
    while any(lane.open for lane in lanes):
        order = lanes if len(pairs) % 2 == first else lanes[::-1]
        spent = {id(lane): lane.step() for lane in order}
        pairs.append((spent[id(lanes[0])], spent[id(lanes[1])]))
        _require_progress(*(lane.clock_s for lane in lanes))
    return lanes[0].block, lanes[1].block, pairs


def _require_progress(a_s: float, b_s: float) -> None:
    """Each of its answers may come in time and all of them late."""
    if b_s > max(HANG_S, HANG_FACTOR * a_s):
        raise CandidateError("hung", f"it took {b_s:.3g} s for what took the incumbent {a_s:.3g} s")


class _Lane:
    def __init__(self, side: Side, shapes: Sequence[RequestShape], prompts: Sequence[tuple[int, ...]]) -> None:
        self.core, self.prompts, self.open, self.clock_s = side.core, prompts, len(shapes), 0.0
        self.tokens: list[list[int]] = [[] for _ in shapes]
        self.times: list[list[float]] = [[] for _ in shapes]
        for index, (shape, prompt) in enumerate(zip(shapes, prompts, strict=True)):
            self.core.add(Request(str(index), prompt, shape.output_tokens, forward=side.forward))

    def step(self) -> float:
        """Runs one planned step to its end, so that the other lane's worker never computes beside it."""
        before = self.clock_s
        self._take()
        while self.core.under_way:
            self._take()
        return self.clock_s - before

    def _take(self) -> None:
        begin = time.perf_counter()
        events = self.core.step()
        self.clock_s += time.perf_counter() - begin
        for event in events:
            self.tokens[int(event.request_id)].append(event.token)
            self.times[int(event.request_id)].append(self.clock_s)
            self.open -= event.finish is not None

    @property
    def block(self) -> Block:
        rows = zip(self.prompts, self.tokens, self.times, strict=True)
        return Block(self.clock_s, tuple(Answer(p, tuple(t), tuple(s)) for p, t, s in rows))


def ratio_of_steps(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Speed of b over a: sum of a's seconds over sum of b's, with the 95 % interval of a ratio of paired sums.

    Standard error by the delta method, sqrt(n / (n - 1) * sum (a_i - R b_i)^2) / sum b_i (Cochran, Sampling Techniques,
    ratio estimator). Prefill and decode steps may gain differently; that widens the interval, never narrows it.
    """
    n = len(pairs)
    total_a, total_b = (sum(column) for column in zip(*pairs, strict=True))
    ratio = total_a / total_b
    if n < 2:
        return Interval(ratio, 0.0, math.inf, n)
    spread = math.sqrt(n / (n - 1) * sum((a - ratio * b) ** 2 for a, b in pairs)) / total_b
    quantile = _T95[n - 2] if n - 1 <= len(_T95) else 1.96
    return Interval(ratio, ratio - quantile * spread, ratio + quantile * spread, n)
