"""The scheduler: step layout, budgets, prefix reuse, preemption; and a state machine against serial execution."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits
from tideforge.engine.scheduler import Request, Scheduler, Step, TokenEvent
from tideforge.errors import UserError

VOCABULARY = 5
STOP = 4


def next_token(forward: str, prefix: tuple[int, ...]) -> int:
    """A model: a function of its forward and of every token before."""
    return hashlib.sha256(f"{forward}{prefix}".encode()).digest()[0] % VOCABULARY


def serial(request: Request) -> list[int]:
    """The oracle: one request alone, no batching, no memory."""
    tokens: list[int] = []
    while len(tokens) < request.max_tokens and (not tokens or tokens[-1] not in request.stop_ids):
        tokens.append(next_token(request.forward, request.prompt + tuple(tokens)))
    return tokens


class Memory:
    """Executes steps on real pages: each slot holds (forward, position, token). Reads only through the block tables."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[str, int, int] | None] = [None] * (num_blocks * block_size)

    def execute(self, step: Step) -> list[int]:
        assert len(set(step.slot_mapping.tolist())) == len(step.slot_mapping), "two tokens share a slot"
        assert step.slot_mapping.min() >= self.block_size, "a real token is written to the dummy block"
        for slot, position, token in zip(step.slot_mapping, step.positions, step.input_ids, strict=True):
            self.slots[int(slot)] = (step.forward, int(position), int(token))
        tokens = []
        for at in step.logits_indices:
            row = int(np.searchsorted(step.query_start_loc, at, side="right")) - 1
            tokens.append(next_token(step.forward, self.context(step, row)))
        return tokens

    def poison(self, forward: str) -> None:
        """What a forward has written is lost, as with a worker that failed."""
        self.slots = [None if held is not None and held[0] == forward else held for held in self.slots]

    def context(self, step: Step, row: int) -> tuple[int, ...]:
        tokens = []
        for position in range(int(step.seq_lens[row])):
            block = int(step.block_tables[row, position // self.block_size])
            held = self.slots[block * self.block_size + position % self.block_size]
            assert held is not None and held[:2] == (step.forward, position), f"row {row} reads {held} at {position}"
            tokens.append(held[2])
        return tuple(tokens)


def make(num_blocks: int = 32, block_size: int = 4, seqs: int = 4, tokens: int = 8, length: int = 64) -> Scheduler:
    return Scheduler(Limits(seqs, tokens, length), BlockPool(num_blocks, block_size))


def run(scheduler: Scheduler, forward: str = "", limit: int = 1000) -> list[TokenEvent]:
    memory = Memory(scheduler.pool.num_blocks, scheduler.pool.block_size)
    events: list[TokenEvent] = []
    for _ in range(limit):
        step = scheduler.schedule(forward)
        if step is None:
            break
        events += scheduler.commit(step, memory.execute(step))
    assert not scheduler.has_work()
    assert scheduler.pool.num_free == scheduler.pool.capacity
    return events


def tokens_of(events: list[TokenEvent], name: str) -> list[int]:
    mine = [event for event in events if event.request_id == name]
    assert [event.index for event in mine] == list(range(len(mine)))
    assert [event.finish is None for event in mine] == [True] * (len(mine) - 1) + [False]
    return [event.token for event in mine]


def test_a_prompt_is_chunked_and_only_its_last_chunk_wants_logits() -> None:
    scheduler = make()
    scheduler.add(Request("r", tuple(range(18)), 1))
    shapes = []
    while (step := scheduler.schedule("")) is not None:
        shapes.append((len(step.input_ids), len(step.logits_indices), int(step.seq_lens[0])))
        scheduler.commit(step, [0] * len(step.request_ids))
    assert shapes == [(8, 0, 8), (8, 0, 16), (2, 1, 18)]


def test_arrays_have_the_shapes_and_dtypes_of_the_contract_and_decodes_come_first() -> None:
    scheduler = make(tokens=8)
    scheduler.add(Request("a", (1, 2, 3), 5))
    step = scheduler.schedule("")
    assert step is not None
    scheduler.commit(step, [7])
    scheduler.add(Request("b", tuple(range(20)), 5))
    step = scheduler.schedule("")
    assert step is not None
    assert (step.num_decodes, step.num_prefills, step.max_query_len, step.max_seq_len) == (1, 1, 7, 8)
    assert step.input_ids.tolist() == [7, *range(7)] and step.input_ids.dtype == np.int64
    assert step.positions.tolist() == [3, *range(7)] and step.positions.dtype == np.int64
    assert step.query_start_loc.tolist() == [0, 1, 8] and step.query_start_loc.dtype == np.int32
    assert step.seq_lens.tolist() == [4, 7] and step.seq_lens.dtype == np.int32
    assert step.logits_indices.tolist() == [0] and step.logits_indices.dtype == np.int64
    assert step.block_tables.shape == (2, 2) and step.block_tables.dtype == np.int32
    assert step.block_tables[0, 1] == 0  # padded with the dummy block
    assert step.slot_mapping[0] == step.block_tables[0, 0] * 4 + 3 and step.slot_mapping.dtype == np.int64
    assert step.sample_positions.tolist() == [4] and step.request_ids == ("a",)
    assert step.temperatures.dtype == step.top_ps.dtype == np.float32 and step.seeds.dtype == np.int64


def test_a_prefix_is_reused_but_the_last_token_is_always_computed() -> None:
    scheduler = make(tokens=16)
    scheduler.add(Request("a", tuple(range(12)), 1))
    run(scheduler)
    scheduler.add(Request("b", tuple(range(12)), 1))
    step = scheduler.schedule("")
    assert step is not None and step.positions.tolist() == [8, 9, 10, 11]
    scheduler.commit(step, [0])
    scheduler.add(Request("c", (*range(12), 0), 1))
    step = scheduler.schedule("")
    assert step is not None and step.positions.tolist() == [12]
    assert (step.num_decodes, step.num_prefills) == (1, 0)


def test_another_forward_never_reads_the_prefix() -> None:
    scheduler = make(tokens=16)
    scheduler.add(Request("a", tuple(range(12)), 1, forward="old"))
    step = scheduler.schedule("old")
    assert step is not None
    scheduler.commit(step, [0])
    scheduler.add(Request("b", tuple(range(12)), 1, forward="new"))
    assert scheduler.schedule("old") is None
    step = scheduler.schedule("new")
    assert step is not None and len(step.input_ids) == 12


def test_preemption_recomputes_the_youngest_and_nobody_notices() -> None:
    scheduler = make(num_blocks=7, seqs=4, tokens=16)
    requests = [Request(str(i), (i, i + 1, i + 2), 14) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    events = run(scheduler)
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert tokens_of(events, request.id) == serial(request)
    finished = [event.request_id for event in events if event.finish]
    assert finished[0] == "0"  # the oldest is never the victim


def test_abort_frees_at_once_also_while_a_step_is_open() -> None:
    scheduler = make()
    scheduler.add(Request("a", tuple(range(6)), 4))
    scheduler.add(Request("b", (9,), 2))
    step = scheduler.schedule("")
    assert step is not None
    scheduler.abort("a")
    scheduler.abort("unknown")
    assert scheduler.pool.num_free == scheduler.pool.capacity - 1
    events = scheduler.commit(step, [0] * len(step.request_ids))
    assert [event.request_id for event in events] == ["b"]


def test_stop_ids_end_a_request_with_the_stop_token() -> None:
    scheduler = make()
    scheduler.add(Request("a", (1,), 9, stop_ids=(3,)))
    finishes = []
    for token in (1, 3):
        step = scheduler.schedule("")
        assert step is not None
        finishes += [event.finish for event in scheduler.commit(step, [token])]
    assert finishes == [None, "stop"]
    assert not scheduler.has_work()


def test_requests_that_can_never_run_are_refused_with_the_reason() -> None:
    scheduler = make(num_blocks=5, length=64)
    scheduler.add(Request("a", (1,), 1))
    for request, reason in (
        (Request("a", (1,), 1), "in flight already"),
        (Request("b", (), 1), "empty prompt"),
        (Request("b", (1,), 0), "empty prompt or max_tokens"),
        (Request("b", (1,), 64), "the limit is 64"),
        (Request("b", (1,), 16), "needs 5 KV blocks, the pool has 4"),
    ):
        with pytest.raises(UserError, match=reason):
            scheduler.add(request)
    with pytest.raises(UserError, match="max_num_batched_tokens"):
        Scheduler(Limits(8, 4, 64), BlockPool(8, 4))


def test_one_step_is_open_at_a_time() -> None:
    scheduler = make()
    scheduler.add(Request("a", (1, 2), 3))
    step = scheduler.schedule("")
    assert step is not None
    with pytest.raises(RuntimeError, match="still open"):
        scheduler.schedule("")
    scheduler.discard(step)
    with pytest.raises(RuntimeError, match="not open"):
        scheduler.commit(step, [0])
    again = scheduler.schedule("")
    assert again is not None and again.input_ids.tolist() == [1, 2]


def test_a_preempted_request_of_an_old_forward_is_not_starved_by_newcomers() -> None:
    scheduler = make(num_blocks=7, seqs=4, tokens=16)
    memory = Memory(7, 4)
    scheduler.add(Request("first", (1,), 20, forward="new"))
    scheduler.add(Request("old", (1, 2, 3), 18, forward="old"))
    done: list[str] = []
    for index in range(60):
        if "old" in done:
            break
        scheduler.add(Request(f"n{index}", (index % VOCABULARY,), 3, forward="new"))
        for forward in ("new", "old"):
            step = scheduler.schedule(forward)
            if step is not None:
                done += [e.request_id for e in scheduler.commit(step, memory.execute(step)) if e.finish]
    assert "old" in done and scheduler.num_preemptions > 0


class Machine(RuleBasedStateMachine):
    """Random arrivals, aborts, failures and steps of two forwards; every answer must equal serial execution."""

    @initialize(
        num_blocks=st.integers(6, 14), block_size=st.integers(1, 4), seqs=st.integers(1, 4), extra=st.integers(0, 6)
    )
    def start(self, num_blocks: int, block_size: int, seqs: int, extra: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(Limits(seqs, seqs + extra, 40), self.pool)
        self.memory = Memory(num_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        tokens=st.integers(1, 8),
        forward=st.sampled_from("ab"),
        stop=st.booleans(),
    )
    def add(self, prompt: list[int], tokens: int, forward: str, stop: bool) -> None:
        self.count += 1
        request = Request(f"r{self.count}", tuple(prompt), tokens, stop_ids=(STOP,) if stop else (), forward=forward)
        if self.pool.blocks_for(len(prompt) + tokens) > self.pool.capacity:
            with pytest.raises(UserError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests[request.id], self.events[request.id] = request, []

    @rule(data=st.data(), forward=st.sampled_from("ab"), times=st.integers(1, 4))
    def step(self, data: st.DataObject, forward: str, times: int) -> None:
        for _ in range(times):
            step = self.scheduler.schedule(forward)
            if step is None:
                return
            assert len(step.input_ids) <= self.scheduler.limits.max_num_batched_tokens
            assert len(step.seq_lens) <= self.scheduler.limits.max_num_seqs
            fate = data.draw(st.sampled_from(["run", "run", "run", "run", "fail", "abort"]))
            if fate == "fail":
                self.scheduler.discard(step)
                self.memory.poison(forward)
                self.scheduler.restart(forward)
                continue
            tokens = self.memory.execute(step)
            if fate == "abort" and step.request_ids:
                self.forget(step.request_ids[0])
            self.take(self.scheduler.commit(step, tokens))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if live := self.scheduler.requests():
            self.forget(data.draw(st.sampled_from(live)))

    def forget(self, name: str) -> None:
        self.scheduler.abort(name)
        del self.requests[name], self.events[name]

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            name = event.request_id
            self.events[name].append(event)
            if event.finish:
                assert tokens_of(self.events[name], name) == serial(self.requests[name])

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running = [s for queue in self.scheduler._running.values() for s in queue]
        held: dict[int, list[tuple[str, int, bool]]] = {}
        for sequence in running:
            for index, block in enumerate(sequence.blocks):
                writable = (index + 1) * self.pool.block_size > sequence.computed
                held.setdefault(block, []).append((sequence.request.forward, index, writable))
        for block in range(1, self.pool.num_blocks):
            assert self.pool.references(block) == len(held.get(block, []))
        assert 0 not in held
        for owners in held.values():
            assert len({owner[:2] for owner in owners}) == 1, "shared across forwards or at two places of a sequence"
            assert len(owners) == 1 or not any(writable for _, _, writable in owners), "a shared block can be written"
        assert self.pool.num_free == self.pool.capacity - len(held)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work():
                break
            progressed = False
            for forward in "ab":
                if (step := self.scheduler.schedule(forward)) is not None:
                    progressed = True
                    self.take(self.scheduler.commit(step, self.memory.execute(step)))
            assert progressed, "work is left but neither forward can do anything"
        for name, request in self.requests.items():
            assert [event.token for event in self.events[name]] == serial(request)
        assert self.pool.num_free == self.pool.capacity


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
