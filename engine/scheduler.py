"""Continuous batching with chunked prefill, prefix reuse and preemption by recompute. Pure Python and numpy.

One step at a time: `schedule` plans a step, an executor runs it, `commit` takes its tokens (or `discard` drops it). A
step of decodes may be planned to run several times in one go; blocks that it may still write are never given away, since
nothing is allocated while a step is open.
Several forwards share one pool, and each sequence is only ever run by the forward that began it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tideforge.engine.blocks import BlockPool, chain_key, root_key
from tideforge.engine.config import Limits, bucket
from tideforge.errors import CandidateError, UserError

SchedulerLimits = Limits


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. The same seed gives the same tokens whatever else is in the batch."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """`id` is unique among requests in flight; `forward` names the forward that runs it from first to last token."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    forward: str = ""


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One emitted token. finish: None, "stop" (the token is a stop id), "length", or "failed" (no token: -1)."""

    request_id: str
    token: int
    index: int
    finish: str | None = None
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache when the request began


@dataclasses.dataclass(frozen=True)
class Step:
    """Arrays as in contract.Batch (numpy), then one entry a logits row [N]: how to sample, and for whom.

    Rows with one query token that want logits count as decodes and come first. `sample_positions` is where in its
    sequence the sampled token will stand. A step of decodes alone may be run up to `num_steps` times in one go, each time
    on the tokens that the last one sampled: its block tables have room for them, and no row ends earlier by its length.
    """

    forward: str
    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    logits_indices: np.ndarray
    temperatures: np.ndarray
    top_ps: np.ndarray
    seeds: np.ndarray
    sample_positions: np.ndarray
    num_decodes: int
    num_prefills: int
    max_query_len: int
    max_seq_len: int
    request_ids: tuple[str, ...]
    num_steps: int = 1


class Flight:
    """A request in flight. `computed` tokens have their K/V in `blocks`; `keys` are those of full computed blocks."""

    def __init__(self, request: Request, arrival: int) -> None:
        self.request, self.arrival = request, arrival
        self.tokens = list(request.prompt)
        self.computed = 0
        self.blocks: list[int] = []
        self.key = root_key(request.forward)
        self.num_published = 0
        self.preempted = False
        self.cached_tokens: int | None = None

    @property
    def remaining(self) -> int:
        """Tokens whose K/V is still to be computed; 1 for a sequence that decodes."""
        return len(self.tokens) - self.computed

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


Plan = list[tuple[Flight, int]]  # how many tokens of which sequence


class Scheduler:
    """Owns every sequence and, through the pool, every block. Not thread-safe: one thread drives it."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            problem = f"is below max_num_seqs ({limits.max_num_seqs})"
            raise UserError("max_num_batched_tokens", problem, "give each sequence one token a step")
        self.limits, self.pool = limits, pool
        self.token_budgets: dict[str, int] = {}  # by forward, where it differs from the limits' max_num_batched_tokens
        self._waiting: dict[str, list[Flight]] = {}  # by forward, oldest first
        self._running: dict[str, list[Flight]] = {}
        self._live: dict[str, Flight] = {}
        self._arrivals = itertools.count()
        self._pending: tuple[Step, Plan] | None = None
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queues a request. Raises UserError when it can never run."""
        thing = f"request {request.id}"
        total = len(request.prompt) + request.max_tokens
        if request.id in self._live:
            raise UserError(thing, "is in flight already", "give each request an id of its own")
        if not request.prompt or request.max_tokens < 1:
            raise UserError(thing, "has an empty prompt or max_tokens below 1", "give at least one token each")
        if total > self.limits.max_model_len:
            problem = f"asks for {total} tokens of context, the limit is {self.limits.max_model_len}"
            raise UserError(thing, problem, "shorten the prompt or max_tokens")
        if self.pool.blocks_for(total) > self.pool.capacity:
            problem = f"needs {self.pool.blocks_for(total)} KV blocks, the pool has {self.pool.capacity}"
            raise UserError(thing, problem, "shorten it or enlarge the pool")
        sequence = Flight(request, next(self._arrivals))
        self._live[request.id] = sequence
        self._waiting.setdefault(request.forward, []).append(sequence)

    def abort(self, request_id: str) -> None:
        """Forgets a request and frees its blocks at once; unknown ids are ignored (it may just have finished)."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._remove(sequence)

    def requests(self, forward: str | None = None) -> list[str]:
        """Ids in flight, oldest first."""
        return [s.request.id for s in self._live.values() if forward is None or s.request.forward == forward]

    def has_work(self, forward: str | None = None) -> bool:
        return bool(self._live) if forward is None else bool(self._waiting.get(forward) or self._running.get(forward))

    @property
    def is_open(self) -> bool:
        """Whether a step is under way: planned, and neither committed to its end nor discarded."""
        return self._pending is not None

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def restart(self, forward: str) -> None:
        """Recomputes everything that `forward` has in flight: what its worker wrote is not to be trusted."""
        for sequence in list(self._running.get(forward, ())):
            self._preempt(sequence)
        self.pool.forget(forward)

    # planning

    def schedule(self, forward: str) -> Step | None:
        """Plans the next step of `forward`, or None when it can do nothing now."""
        if self._pending is not None:
            raise RuntimeError("a step is still open: commit or discard it first")
        plan: Plan = []
        preemptions = self.num_preemptions
        budget = self._plan_running(forward, plan)
        if self.num_preemptions == preemptions:
            self._admit(forward, plan, budget)
        if not plan:
            return None
        plan.sort(key=lambda entry: (entry[1] > 1 or entry[0].remaining > 1, entry[0].arrival))
        step = build_step(forward, plan, self.pool.block_size, self._run_ahead(plan))
        self._pending = (step, plan)
        return step

    def _run_ahead(self, plan: Plan) -> int:
        """How often a plan of decodes may run in one go: until a row ends by its length, while blocks are free."""
        if any(sequence.remaining > 1 for sequence, _ in plan):
            return 1
        num_steps = min([self.limits.decode_steps, *(s.request.max_tokens - s.emitted for s, _ in plan)])
        while num_steps > 1 and sum(self._missing(s, num_steps) for s, _ in plan) > self.pool.num_free:
            num_steps -= 1
        for sequence, _ in plan:
            if (missing := self._missing(sequence, num_steps)) > 0:
                sequence.blocks += self.pool.allocate(missing)
        return num_steps

    def _missing(self, sequence: Flight, count: int) -> int:
        """Blocks that `count` more tokens need beyond those it has (never below 0)."""
        return max(0, self.pool.blocks_for(sequence.computed + count) - len(sequence.blocks))

    def _plan_running(self, forward: str, plan: Plan) -> int:
        """Decodes first, then prefills under way, oldest first. Returns what is left of the token budget."""
        budget = whole = self.token_budgets.get(forward, self.limits.max_num_batched_tokens)
        for sequence in sorted(self._running.get(forward, ()), key=lambda s: (s.remaining > 1, s.arrival)):
            count = min(sequence.remaining, budget)
            if count == 0 or sequence not in self._running[forward] or not self._make_room(sequence, count, plan):
                continue
            plan.append((sequence, count))
            budget -= count
        return whole - sum(count for _, count in plan)

    def _make_room(self, sequence: Flight, count: int, plan: Plan) -> bool:
        """Gives `sequence` blocks for `count` more tokens, preempting the youngest. False when that is itself."""
        needed = self._missing(sequence, count)
        while needed > self.pool.num_free:
            victim = max(itertools.chain.from_iterable(self._running.values()), key=lambda s: s.arrival)
            self._preempt(victim)
            plan[:] = [entry for entry in plan if entry[0] is not victim]
            if victim is sequence:
                return False
        if needed > 0:
            sequence.blocks += self.pool.allocate(needed)
        return True

    def _admit(self, forward: str, plan: Plan, budget: int) -> None:
        """Starts waiting sequences in order of arrival, each with the prefix that is there already."""
        waiting, running = self._waiting.get(forward, []), self._running.setdefault(forward, [])
        while waiting and budget > 0 and len(running) < self.limits.max_num_seqs:
            sequence = waiting[0]
            if self._owed_to_older(sequence):
                return
            # At least the last token is computed: its logits are wanted.
            shared, key = self.pool.match(forward, sequence.tokens[:-1])
            needed = self.pool.blocks_for(len(sequence.tokens)) - len(shared)
            if needed > self.pool.num_free_after(shared):
                return
            self.pool.share(shared)
            sequence.blocks, sequence.key = list(shared), key
            sequence.num_published = len(shared)
            sequence.computed = len(shared) * self.pool.block_size
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            count = min(sequence.remaining, budget)
            sequence.blocks += self.pool.allocate(self.pool.blocks_for(sequence.computed + count) - len(shared))
            sequence.preempted = False
            running.append(waiting.pop(0))
            plan.append((sequence, count))
            budget -= count

    def _owed_to_older(self, sequence: Flight) -> bool:
        """Whether a preempted older sequence of another forward waits: newcomers must not take its blocks for ever."""
        heads = (waiting[0] for waiting in self._waiting.values() if waiting)
        return any(head.preempted and head.arrival < sequence.arrival for head in heads)

    def _preempt(self, sequence: Flight) -> None:
        """Back to the queue without blocks; the tokens it has emitted stay and are computed again."""
        forward = sequence.request.forward
        self._running[forward].remove(sequence)
        self._free(sequence)
        sequence.computed, sequence.num_published, sequence.key = 0, 0, root_key(forward)
        sequence.preempted = True
        bisect.insort(self._waiting.setdefault(forward, []), sequence, key=lambda s: s.arrival)
        self.num_preemptions += 1

    # results

    def commit(self, step: Step, tokens: Sequence[int], last: bool = True) -> list[TokenEvent]:
        """Takes the N tokens of one run of the step; the last one closes it.

        Raises CandidateError("not_finite") when one is negative: the step is closed and its tokens are not taken.
        """
        plan = self._close(step)
        if len(tokens) != len(step.request_ids):
            raise ValueError(f"{len(tokens)} tokens for {len(step.request_ids)} rows")
        sampled = dict(zip(step.request_ids, tokens, strict=True))
        for sequence, _ in plan:
            if self._is_live(sequence) and sampled.get(sequence.request.id, 0) < 0:
                message = f"logits of request {sequence.request.id} hold NaN or were not written"
                raise CandidateError("not_finite", message)
        if not last:
            self._pending = (step, plan)
        return list(self._advance(plan, sampled))

    def discard(self, step: Step) -> None:
        """Drops an open step that was not executed; its sequences stay as they were."""
        self._close(step)

    def _close(self, step: Step) -> Plan:
        if self._pending is None or self._pending[0] is not step:
            raise RuntimeError("this step is not open")
        plan, self._pending = self._pending[1], None
        return plan

    def _advance(self, plan: Plan, sampled: dict[str, int]) -> Iterator[TokenEvent]:
        for sequence, count in plan:
            request = sequence.request
            if not self._is_live(sequence):
                continue  # aborted while the step ran, or ended by a stop token
            sequence.computed += count
            self._publish(sequence)
            if sequence.remaining > 0:
                continue  # more of the prompt to come
            token = sampled[request.id]
            sequence.tokens.append(token)
            length = "length" if sequence.emitted == request.max_tokens else None
            finish = "stop" if token in request.stop_ids else length
            if finish:
                self._remove(sequence)
            yield TokenEvent(request.id, token, sequence.emitted - 1, finish, sequence.cached_tokens or 0)

    def _is_live(self, sequence: Flight) -> bool:
        return self._live.get(sequence.request.id) is sequence

    def _publish(self, sequence: Flight) -> None:
        if not self.pool.prefix_cache:
            return  # hashing a long prompt's blocks would be part of its time to first token
        size = self.pool.block_size
        for index in range(sequence.num_published, sequence.computed // size):
            sequence.key = chain_key(sequence.key, sequence.tokens[index * size : (index + 1) * size])
            self.pool.publish(sequence.blocks[index], sequence.key, sequence.request.forward)
            sequence.num_published += 1

    def _remove(self, sequence: Flight) -> None:
        forward = sequence.request.forward
        for queue in (self._running.get(forward, []), self._waiting.get(forward, [])):
            if sequence in queue:
                queue.remove(sequence)
        self._free(sequence)
        del self._live[sequence.request.id]

    def _free(self, sequence: Flight) -> None:
        self.pool.release(sequence.blocks[::-1])
        sequence.blocks = []


def build_step(forward: str, plan: Plan, block_size: int, num_steps: int = 1) -> Step:
    """Lays a plan out as arrays with the shapes and dtypes of contract.Batch."""
    counts = [count for _, count in plan]
    ends = np.cumsum([0, *counts])
    positions = np.concatenate([np.arange(s.computed, s.computed + n, dtype=np.int64) for s, n in plan])
    tables = np.zeros((len(plan), max(len(s.blocks) for s, _ in plan)), np.int32)
    for row, (sequence, _) in enumerate(plan):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    rows = np.repeat(np.arange(len(plan)), counts)
    blocks = tables[rows, positions // block_size].astype(np.int64)
    sampled = [(row, s) for row, (s, n) in enumerate(plan) if n == s.remaining]
    sampling = [s.request.sampling for _, s in sampled]
    longest = max(s.computed + n for s, n in plan) + num_steps - 1
    num_decodes = sum(1 for s, n in plan if n == s.remaining == 1)
    return Step(
        forward=forward,
        input_ids=np.concatenate([np.asarray(s.tokens[s.computed : s.computed + n], np.int64) for s, n in plan]),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        block_tables=tables,
        seq_lens=np.asarray([s.computed + n for s, n in plan], np.int32),
        query_start_loc=ends.astype(np.int32),
        logits_indices=np.asarray([ends[row + 1] - 1 for row, _ in sampled], np.int64),
        temperatures=np.asarray([s.temperature for s in sampling], np.float32),
        top_ps=np.asarray([s.top_p for s in sampling], np.float32),
        seeds=np.asarray([s.seed for s in sampling], np.int64),
        sample_positions=np.asarray([len(s.tokens) for _, s in sampled], np.int64),
        num_decodes=num_decodes,
        num_prefills=len(plan) - num_decodes,
        max_query_len=max(counts),
        max_seq_len=bucket(int(longest)),
        request_ids=tuple(s.request.id for _, s in sampled),
        num_steps=num_steps,
    )
