"""The passes of a slow trial: incumbent and candidate in turn, step by step or by whole loads, and when there are enough."""

from __future__ import annotations

import dataclasses
import itertools
import random
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tideforge.engine import load as loads
from tideforge.engine import measure

if TYPE_CHECKING:
    from tideforge.engine.evaluate import Bench
    from tideforge.engine.prepared import Prepared

HOPELESS = 0.97  # below this ratio after a pass, no further pass is spent
MIN_PAIRS = 8  # of steps, before an interval decides anything: the spread of a few is luck
MIN_LOADS = 4  # the same, of whole loads: two passes


@dataclasses.dataclass(frozen=True)
class Timed:
    """All passes so far."""

    ratio: measure.Interval  # of the objective, above 1 where the candidate is better; without the noise floor
    blocks: tuple[tuple[measure.Block, measure.Block], ...]  # incumbent's and candidate's
    fastest_step_s: float  # of the candidate
    least_pairs: int  # before the interval decides anything
    reused: tuple[measure.Answer, ...] = ()  # the candidate's to prompts that began in the prefix cache

    def decided(self, noise: Sequence[float]) -> bool:
        """Whether another pass would change nothing that counts: the final score is another measurement."""
        found = self.ratio
        better = measure.with_noise_floor(found, noise).low > 1
        sure = found.pairs >= self.least_pairs and (better or found.high - found.low < 2 * measure.PRECISE)
        return found.ratio < HOPELESS or sure

    def to_check(self, count: int) -> list[measure.Answer]:
        """Some of the candidate's answers, and where prefixes were reused one that did."""
        answers, draw = [answer for _, block in self.blocks for answer in block.answers], secrets.SystemRandom()
        return draw.sample(answers, min(count, len(answers))) + draw.sample(self.reused, min(1, len(self.reused)))


def passes(bench: Bench, prepared: Prepared) -> Iterator[Timed]:
    """One pass after the other, as the bench's objective has them timed. Raises what the workers' steps raise."""
    by_loads = bench.config.objective.by_loads(bench.workload.search)
    return itertools.islice((load_passes if by_loads else step_passes)(bench, prepared), bench.config.passes)


def step_passes(bench: Bench, prepared: Prepared) -> Iterator[Timed]:
    """A replay of the search part a pass, one request a user, step by step."""
    candidate = measure.Side.of(prepared.forward.id, bench.new_core(), prepared.staged)
    blocks: list[tuple[measure.Block, measure.Block]] = []
    pairs: list[tuple[float, float]] = []
    while True:
        incumbent = measure.Side.of(bench.incumbent.id, bench.new_core(), bench.incumbent_worker)
        a, b, steps = measure.lockstep(incumbent, candidate, *bench.replay())
        blocks.append((a, b))
        pairs += steps
        yield Timed(measure.ratio_of_steps(pairs), tuple(blocks), min(b for _, b in pairs), MIN_PAIRS)


def load_passes(bench: Bench, prepared: Prepared) -> Iterator[Timed]:
    """Two pairs of whole loads a pass, A B B A. One load a trial, fresh text for each pair."""
    objective, settings = bench.config.objective, bench.settings
    longest, rng = min(settings.limits.max_model_len, len(bench.corpus) - 1), random.Random(secrets.randbits(64))
    load = objective.load_of(bench.workload.search, bench.workload.users, longest, rng)
    a = measure.Side.of(bench.incumbent.id, loads.core_for(settings, load), bench.incumbent_worker)
    b = measure.Side.of(prepared.forward.id, loads.core_for(settings, load), prepared.staged)
    found: list[tuple[loads.LoadBlock, loads.LoadBlock]] = []
    for pair in loads.replays(a, b, load, bench.corpus):
        found.append(pair)
        if len(found) % 2 == 0:
            replies = [reply for _, block in found for reply in block.replies]
            yield Timed(
                measure.interval([objective.worth(b) / objective.worth(a) for a, b in found]),
                tuple((a.block, b.block) for a, b in found),
                min(reply.answer.times_s[-1] / len(reply.answer.tokens) for reply in replies),  # a token takes a step
                MIN_LOADS,
                tuple(reply.answer for reply in replies if reply.cached_tokens),
            )
