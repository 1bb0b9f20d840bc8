"""The core alternates over forwards, and a failure of one forward's executor touches only its own requests."""

from __future__ import annotations

import pytest

from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Sampled
from tideforge.engine.scheduler import Request, Step, TokenEvent
from tideforge.errors import CandidateError, PeerGone, UserError

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)


class Counting:
    """Answers each row with its position; fails from the `fail_at`-th step on."""

    def __init__(self, fail_at: int = 1 << 30, token: int | None = None) -> None:
        self.steps, self.fail_at, self.token = 0, fail_at, token

    def execute(self, step: Step) -> list[Sampled]:
        self.steps += 1
        if self.steps >= self.fail_at:
            raise PeerGone("worker died")
        return [Sampled([int(p) if self.token is None else self.token for p in step.sample_positions])]

    def halt(self) -> None:
        pass


def drain(core: EngineCore) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(500):
        if not core.has_work():
            return events
        events += core.step()
    raise AssertionError("the core does not finish")


def request(name: str, forward: str, prompt: int = 5, tokens: int = 4) -> Request:
    return Request(name, tuple(range(prompt)), tokens, forward=forward)


def test_two_forwards_take_turns() -> None:
    core = EngineCore(LIMITS, BlockPool(16, 4))
    order: list[str] = []

    class Noting(Counting):
        def execute(self, step: Step) -> list[Sampled]:
            order.append(step.forward)
            return super().execute(step)

    for forward in "ab":
        core.attach(forward, Noting())
        core.add(request(forward, forward))
    events = drain(core)
    assert order == ["a", "b"] * 4
    assert [e.token for e in events if e.request_id == "a"] == [5, 6, 7, 8]
    assert core.pool.num_free == core.pool.capacity


def test_without_a_handler_the_failure_is_raised_and_nothing_is_held() -> None:
    core = EngineCore(LIMITS, BlockPool(16, 4))
    core.attach("a", Counting(fail_at=2))
    core.add(request("r", "a"))
    core.step()
    with pytest.raises(PeerGone):
        core.step()
    assert not core.has_work()
    assert core.pool.num_free == core.pool.capacity
    core.attach("a", Counting())
    core.add(request("r", "a"))
    assert [e.token for e in drain(core)] == [5, 6, 7, 8]


def test_failure_of_one_forward_leaves_the_other_alone() -> None:
    core = EngineCore(LIMITS, BlockPool(16, 4), on_failure=lambda forward, error: None)
    core.attach("bad", Counting(fail_at=2))
    core.attach("good", Counting())
    for name in ("x", "y"):
        core.add(request(name, "bad"))
        core.add(request(name + "2", "good"))
    events = drain(core)
    assert {e.request_id for e in events if e.finish == "failed"} == {"x", "y"}
    assert {e.request_id for e in events if e.finish == "length"} == {"x2", "y2"}
    assert core.pool.num_free == core.pool.capacity


def test_a_replacement_continues_where_the_tokens_stand() -> None:
    core = EngineCore(LIMITS, BlockPool(16, 4), on_failure=lambda forward, error: Counting())
    core.attach("a", Counting(fail_at=3))
    core.add(request("r", "a", prompt=9, tokens=6))
    events = drain(core)
    assert [e.token for e in events] == [9, 10, 11, 12, 13, 14]
    assert [e.index for e in events] == list(range(6))


def test_a_negative_token_is_a_failure_and_never_emitted() -> None:
    core = EngineCore(LIMITS, BlockPool(16, 4))
    core.attach("a", Counting(token=-1))
    core.add(request("r", "a"))
    with pytest.raises(CandidateError) as caught:
        drain(core)
    assert caught.value.outcome == "not_finite"
    assert not core.has_work()


def test_detach_refuses_while_requests_run_and_unknown_forwards_are_refused() -> None:
    core = EngineCore(LIMITS, BlockPool(16, 4))
    with pytest.raises(UserError, match="attach it first"):
        core.add(request("r", "nobody"))
    core.attach("a", Counting())
    core.add(request("r", "a", prompt=9))
    with pytest.raises(UserError, match="in flight"):
        core.detach("a")
    drain(core)
    assert core.pool.num_prefixes > 0
    core.detach("a")
    assert core.pool.num_prefixes == 0
    assert core.forwards == ()
