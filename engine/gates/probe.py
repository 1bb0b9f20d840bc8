"""What a gate works with: the finalist in a fresh worker, KV pages that the authority sees and poisons, the reference.

No gate runs in the worker, and none asks it anything but to execute steps.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tideforge.data.workload import RequestShape
from tideforge.engine.blocks import BlockPool
from tideforge.engine.compare import Bounds
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Executor, Sampled
from tideforge.engine.memory import Arena
from tideforge.engine.reference import Reference
from tideforge.engine.scheduler import Request, SchedulerLimits, Step

SHAPES = (
    RequestShape(24, 8),
    RequestShape(17, 12),
    RequestShape(40, 6),
    RequestShape(5, 16),
)  # where no workload is known
POISON = 0x42  # every float type then reads about 48.6: stale, wrong, finite


@dataclasses.dataclass(frozen=True)
class Row:
    """The logits of one emitted token, with where the sequence's K and V lie."""

    logits: np.ndarray  # [V] fp32
    blocks: tuple[int, ...]
    context: int  # tokens whose K and V are written


class Recorder:
    """Passes steps on to the worker, and keeps logits rows and violations of the pages that a step may not touch.

    `forced` maps request id -> tokens to emit instead of the sampled ones (teacher forcing).
    """

    def __init__(
        self, inner: Executor, arena: Arena, forced: Mapping[str, Sequence[int]] | None = None, guard: bool = False
    ) -> None:
        self.inner, self.arena, self.forced, self.guard = inner, arena, forced or {}, guard
        self.rows: dict[str, list[Row]] = {}
        self.violations: list[str] = []
        self.secret = secrets.randbits(128)  # of the digests by which it tells what changed

    def execute(self, step: Step) -> list[Sampled]:
        before = [marks.copy() for marks in self.arena.marks(self.secret)] if self.guard else []
        [sampled] = self.inner.execute(step)  # a probe's core plans one step at a time: every logits row is read
        if self.guard:
            self._compare(step, before)
        return [Sampled(self._record(step, sampled.tokens))]

    def halt(self) -> None:
        pass

    def _compare(self, step: Step, before: list[np.ndarray]) -> None:
        allowed = np.zeros(len(before[0]), bool)
        allowed[step.slot_mapping] = True
        allowed[: self.arena.layout.block_size] = True  # the dummy page
        for index, (old, new) in enumerate(zip(before, self.arena.marks(self.secret), strict=True)):
            changed = (old != new).any(axis=1) & ~allowed
            if changed.any():
                slot = int(np.flatnonzero(changed)[0])
                name = "values" if index % 2 else "keys"
                self.violations.append(
                    f"layer {index // 2} {name}: slot {slot} was written, {int(changed.sum())} in all"
                )

    def _record(self, step: Step, tokens: Sequence[int]) -> list[int]:
        logits = self.arena.logits(len(tokens)).copy()
        row_of = {int(step.query_start_loc[b + 1]) - 1: b for b in range(len(step.seq_lens))}
        answer = []
        for n, (request, token) in enumerate(zip(step.request_ids, tokens, strict=True)):
            b = row_of[int(step.logits_indices[n])]
            rows = self.rows.setdefault(request, [])
            rows.append(Row(logits[n], tuple(int(x) for x in step.block_tables[b]), int(step.seq_lens[b])))
            chain = self.forced.get(request)
            answer.append(int(chain[len(rows) - 1]) if chain is not None and token >= 0 else token)
        return answer


@dataclasses.dataclass(frozen=True)
class Probe:
    """Everything that the gates of one verification share."""

    forward: str
    worker: Executor
    arena: Arena
    reference: Reference
    limits: SchedulerLimits
    layers: range
    bounds: Bounds
    text: tuple[int, ...]  # token ids of real text that no search saw
    secret: Callable[[], int]
    shapes: tuple[RequestShape, ...] = SHAPES  # what timed blocks replay, and how many of them at once
    users: int = 4
    captured: tuple[int, ...] = ()  # batch sizes of decodes that the worker has graphs of
    context: int = 0  # tokens of the traffic's longest requests (P99); 0: not known

    def timed_core(self, executor: Executor) -> EngineCore:
        """As timed blocks have it: with runs of decodes, without a prefix cache."""
        core = EngineCore(self.limits, BlockPool(self.arena.layout.num_blocks, self.arena.layout.block_size, False))
        core.attach(self.forward, executor)
        return core

    def core(
        self, recorder: Executor, num_blocks: int | None = None, prefix_cache: bool = False, decode_steps: int = 1
    ) -> EngineCore:
        layout = self.arena.layout
        limits = dataclasses.replace(self.limits, decode_steps=decode_steps)
        core = EngineCore(limits, BlockPool(num_blocks or layout.num_blocks, layout.block_size, prefix_cache))
        core.attach(self.forward, recorder)
        return core

    def request(self, name: str, prompt: Sequence[int], max_tokens: int) -> Request:
        return Request(name, tuple(prompt), max_tokens, forward=self.forward)

    def spans(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """A span of the held-out text for each length, at places that nobody can know beforehand."""
        rng = np.random.default_rng(self.secret())
        starts = [int(rng.integers(0, len(self.text) - length)) for length in lengths]
        return [self.text[at : at + length] for at, length in zip(starts, lengths, strict=True)]


def drain(core: EngineCore, requests: Sequence[Request], at_once: int) -> dict[str, list[int]]:
    """Runs the requests, `at_once` in flight, and returns each one's tokens."""
    waiting, tokens, flying = list(requests)[::-1], {request.id: [] for request in requests}, 0  # type: ignore[var-annotated]
    while waiting or flying:
        while waiting and flying < at_once:
            core.add(waiting.pop())
            flying += 1
        for event in core.step():
            tokens[event.request_id].append(event.token)
            flying -= event.finish is not None
    return tokens
