"""Decode steps that run several times in one go: the same tokens as one at a time, whatever ends, comes or fails meanwhile."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Sampled
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.scheduler import Request, Sampling, Step
from tideforge.errors import CandidateError

BLOCK = 4


class Device:
    """Runs ahead as a worker does: inputs of the next step come from the tokens of the last, slots from the block table.

    A token is a hash of the whole chain that its pages hold, so a wrong slot or a page given away shows. `patience` is
    how many more steps run once a halt was asked for.
    """

    def __init__(self, num_blocks: int, patience: int = 1, bad_at: int | None = None) -> None:
        self.slots = [-1] * (num_blocks * BLOCK)
        self.patience, self.bad_at, self.runs, self.halts, self.closed_early = patience, bad_at, 0, 0, 0

    def execute(self, step: Step):
        ids, positions, slots = step.input_ids.copy(), step.positions.copy(), step.slot_mapping.copy()
        lengths, left, halts = step.seq_lens.copy(), step.num_steps, self.halts
        while left > 0:
            self.runs += 1
            for slot, token in zip(slots, ids, strict=True):
                self.slots[int(slot)] = int(token)
            tokens = [
                self._token(step.block_tables[self._row(step, at)], lengths[self._row(step, at)])
                for at in step.logits_indices
            ]
            left = min(left - 1, self.patience) if self.halts > halts else left - 1
            if self.bad_at == self.runs:
                tokens[0] = -1
            try:
                yield Sampled(tokens, left == 0)
            except GeneratorExit:
                self.closed_early += left > 0
                raise
            if left > 0:
                ids, positions, lengths = np.asarray(tokens), positions + 1, lengths + 1
                rows = np.arange(len(positions))
                slots = step.block_tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK

    def halt(self) -> None:
        self.halts += 1

    def _row(self, step: Step, at: int) -> int:
        return int(np.searchsorted(step.query_start_loc, at, side="right")) - 1

    def _token(self, table: np.ndarray, length: int) -> int:
        chain = tuple(self.slots[int(table[i // BLOCK]) * BLOCK + i % BLOCK] for i in range(int(length)))
        assert -1 not in chain, "a page was read that nobody wrote"
        return hash(chain) % 97


requests = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12), st.booleans()), min_size=1, max_size=8)


def tokens_of(wanted, decode_steps: int, blocks: int, late: int) -> tuple[dict[str, list[int]], Device]:
    """Emitted tokens; the last `late` requests arrive one at a time while others run."""
    device = Device(blocks)
    core = EngineCore(Limits(3, 8, 64, decode_steps), BlockPool(blocks, BLOCK))
    core.attach("f", device)
    todo = [
        Request(
            str(i),
            tuple(range(100 * i, 100 * i + prompt)),
            count,
            stop_ids=tuple(range(40)) if stops else (),
            forward="f",
        )
        for i, (prompt, count, stops) in enumerate(wanted)
    ]
    out: dict[str, list[int]] = {request.id: [] for request in todo}
    split = max(1, len(todo) - late)
    for request in todo[:split]:
        core.add(request)
    todo = todo[split:]
    while core.has_work() or todo:
        if todo:
            core.add(todo.pop(0))
        for event in core.step():
            out[event.request_id].append(event.token)
    while core.under_way:
        assert core.step() == []
    assert core.pool.num_free == core.pool.capacity
    return out, device


@given(requests, st.integers(2, 9), st.integers(8, 24), st.integers(0, 4))
def test_the_tokens_are_those_of_one_step_at_a_time(wanted, decode_steps, blocks, late) -> None:
    plain, _ = tokens_of(wanted, 1, blocks, late)
    ahead, _ = tokens_of(wanted, decode_steps, blocks, late)
    assert ahead == plain


def test_a_lone_request_is_planned_once_for_its_prompt_and_once_for_all_its_decodes() -> None:
    core, device = EngineCore(Limits(3, 8, 64, 100), BlockPool(24, BLOCK)), Device(24)
    core.attach("f", device)
    core.add(Request("r", (1, 2, 3), 20, forward="f"))
    plans = 0
    schedule = core.scheduler.schedule

    def counted(forward):
        nonlocal plans
        plans += 1
        return schedule(forward)

    core.scheduler.schedule = counted
    events = []
    while core.has_work():
        events += core.step()
    assert (len(events), plans) == (20, 2)


def test_a_newcomer_halts_the_run_and_does_not_wait_for_its_end() -> None:
    core, device = EngineCore(Limits(3, 8, 256, 200), BlockPool(64, BLOCK)), Device(64)
    core.attach("f", device)
    core.add(Request("long", (1, 2, 3), 150, forward="f"))
    for _ in range(5):
        core.step()
    core.add(Request("new", (7, 8), 2, forward="f"))
    seen: list[str] = []
    while "new" not in seen:
        seen += [event.request_id for event in core.step()]
    assert device.halts == 1 and len(seen) <= 5


def test_nan_in_mid_run_closes_the_run_and_the_next_one_starts_clean() -> None:
    core, device = EngineCore(Limits(3, 8, 64, 10), BlockPool(24, BLOCK)), Device(24, bad_at=4)
    core.attach("f", device)
    core.add(Request("r", (1, 2, 3), 9, forward="f"))
    with pytest.raises(CandidateError, match="NaN"):
        for _ in range(9):
            core.step()
    assert device.closed_early == 1 and not core.under_way and not core.has_work()
    core.add(Request("r", (1, 2, 3), 9, forward="f"))
    events = []
    while core.has_work():
        events += core.step()
    assert len(events) == 9


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_worker_advances_its_own_inputs(tiny, plain, tmp_path, temperature) -> None:
    settings = Settings(state=tmp_path, model=tiny, num_blocks=64)
    out = []
    for decode_steps in (1, 7):
        limits = dataclasses.replace(settings.limits, decode_steps=decode_steps)
        core = EngineCore(limits, BlockPool(64, settings.block_size))
        core.attach("f", LocalExecutor(plain, LocalMemory(settings)))
        for i in range(3):
            core.add(Request(str(i), tuple(range(5 + i, 25 + 3 * i)), 21, Sampling(temperature, 0.9, i), forward="f"))
        events = []
        while core.has_work():
            events += core.step()
        out.append([(e.request_id, e.index, e.token) for e in sorted(events, key=lambda e: (e.request_id, e.index))])
    assert out[0] == out[1]


def test_a_remote_run_that_is_dropped_leaves_nothing_for_the_next_step(lab, plain) -> None:
    worker = lab.spawn(plain, lab.arena("ahead"))
    limits = dataclasses.replace(lab.settings.limits, decode_steps=50)

    def run(stop_after: int | None) -> list[int]:
        core = EngineCore(limits, BlockPool(64, lab.settings.block_size))
        core.attach(plain.id, worker)
        core.add(Request("r", tuple(range(9)), 40, forward=plain.id))
        tokens: list[int] = []
        while core.has_work() and (stop_after is None or len(tokens) < stop_after):
            tokens += [event.token for event in core.step()]
        if core._under_way is not None:
            core._under_way[1].close()
        return tokens

    whole = run(None)
    assert len(whole) == 40
    assert run(5) == whole[:5]
    assert run(None) == whole
    lab.release(worker)
