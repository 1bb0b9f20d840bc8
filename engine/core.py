"""The engine core: scheduler and executors, one step at a time. It lives with the authority, never with a candidate."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from tideforge.engine.blocks import BlockPool
from tideforge.engine.scheduler import Request, Scheduler, SchedulerLimits, Step, TokenEvent
from tideforge.errors import TideforgeError, UserError

if TYPE_CHECKING:
    from tideforge.engine.executor import Executor, Sampled

    OnFailure = Callable[[str, TideforgeError], Executor | None]


class EngineCore:
    """Alternates over the forwards that have work. One thread drives it.

    When an executor raises, `on_failure(forward id, error)` may give another executor of the same forward: its requests
    are then computed anew from their tokens. Given None they end as events with finish "failed". Without on_failure the
    requests are aborted and the error is raised: what a measurement wants.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, on_failure: OnFailure | None = None) -> None:
        self.scheduler = Scheduler(limits, pool)
        self._executors: dict[str, Executor] = {}
        self.on_failure = on_failure
        self._last = ""
        self._under_way: tuple[Step, Generator[Sampled]] | None = None

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def forwards(self) -> tuple[str, ...]:
        return tuple(self._executors)

    def attach(self, forward: str, executor: Executor, max_num_batched_tokens: int | None = None) -> None:
        """From now on `executor` runs this forward's requests, with a token budget of its own if one is given."""
        if max_num_batched_tokens is not None:
            if max_num_batched_tokens < self.scheduler.limits.max_num_seqs:
                raise UserError(
                    "max_num_batched_tokens", "is below max_num_seqs", "give each sequence one token a step"
                )
            self.scheduler.token_budgets[forward] = max_num_batched_tokens
        self._executors[forward] = executor

    def detach(self, forward: str) -> Executor:
        """Takes an idle forward out, with the prefixes that it wrote; the caller ends the executor."""
        if self.scheduler.has_work(forward):
            raise UserError(f"forward {forward[:12]}", "has requests in flight", "let them finish or abort them first")
        self.pool.forget(forward)
        self.scheduler.token_budgets.pop(forward, None)
        return self._executors.pop(forward)

    def add(self, request: Request) -> None:
        """Raises UserError when the request can never run or its forward is not attached."""
        if request.forward not in self._executors:
            raise UserError(f"request {request.id}", f"names forward {request.forward[:12]!r}", "attach it first")
        self.scheduler.add(request)
        if self._under_way is not None and self._under_way[0].num_steps > 1:
            self._executors[self._under_way[0].forward].halt()  # so that the newcomer is planned for soon

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def has_work(self, forward: str | None = None) -> bool:
        return self.scheduler.has_work(forward)

    @property
    def under_way(self) -> bool:
        """Whether a worker is running a step whose tokens are not all here: the next `step` waits for them."""
        return self._under_way is not None

    def step(self) -> list[TokenEvent]:
        """Tokens of the step that is under way, or of the next forward that can do something; [] when there is nothing."""
        if self._under_way is None:
            step = self._next_step()
            if step is None:
                return []
            self._under_way = step, self._answers(step)
        step, answers = self._under_way
        try:
            sampled = next(answers)
            events = self.scheduler.commit(step, sampled.tokens, sampled.last)
        except TideforgeError as error:  # the executor's, or NaN logits: either way the scheduler has taken nothing
            self._under_way = None
            answers.close()
            return self._failed(step.forward, error)
        if not self.scheduler.is_open:
            self._under_way = None
        return events

    def _answers(self, step: Step) -> Generator[Sampled]:
        try:
            yield from self._executors[step.forward].execute(step)
        except BaseException:
            if self.scheduler.is_open:
                self.scheduler.discard(step)
            raise

    def _next_step(self) -> Step | None:
        names = list(self._executors)
        turn = names.index(self._last) + 1 if self._last in names else 0
        for forward in names[turn:] + names[:turn]:
            if self.scheduler.has_work(forward) and (step := self.scheduler.schedule(forward)) is not None:
                self._last = forward
                return step
        return None

    def _failed(self, forward: str, error: TideforgeError) -> list[TokenEvent]:
        replacement = self.on_failure(forward, error) if self.on_failure else None
        self.scheduler.restart(forward)
        if replacement is not None:
            self._executors[forward] = replacement
            return []
        ids = self.scheduler.requests(forward)
        for request_id in ids:
            self.scheduler.abort(request_id)
        if self.on_failure is None:
            raise error
        return [TokenEvent(request_id, -1, -1, "failed") for request_id in ids]
