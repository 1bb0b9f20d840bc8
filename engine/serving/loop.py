"""The engine loop: one thread that drives the core. Everything else reaches the core through `call`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Executor
from tideforge.engine.scheduler import Request, TokenEvent
from tideforge.errors import TideforgeError

T = TypeVar("T")
Deliver = Callable[[TokenEvent], None]
log = logging.getLogger(__name__)


class LoopStopped(TideforgeError):
    """The engine loop has ended; no request is taken any more."""


class EngineLoop:
    """Steps while there is work, sleeps otherwise. `current` is the forward that new requests go to."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.current = core, ""
        self.error: BaseException | None = None
        self.num_tokens = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._listeners: dict[str, Deliver] = {}
        self._retiring: dict[str, Future[Executor]] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step under way; what is still in flight fails."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    # from any thread

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Runs `function(core)` between two steps. The future has what came of it; a cancelled one never runs."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self.core))
            except Exception as error:  # the caller's to handle, wherever it waits
                future.set_exception(error)

        with self._wake:
            if self._stopping:
                raise LoopStopped("the server is stopping")
            self._commands.append(command)
            self._wake.notify()
        return future

    def submit(self, request: Request, deliver: Deliver) -> Future[str]:
        """Adds a request, on the forward that serves then unless it names one; the future gives that forward's id."""

        def add(core: EngineCore) -> str:
            forward = request.forward or self.current
            core.add(dataclasses.replace(request, forward=forward))
            self._listeners[request.id] = deliver
            return forward

        return self.call(add)

    def abort(self, request_id: str) -> None:
        """Frees a request's blocks before the next step; nothing happens if it has ended."""

        def drop(core: EngineCore) -> None:
            core.abort(request_id)
            self._listeners.pop(request_id, None)

        with contextlib.suppress(LoopStopped):
            self.call(drop)

    def retire(self, forward: str) -> Future[Executor]:
        """Takes a forward out once the requests that it began are finished; the future gives its executor."""
        future: Future[Executor] = Future()

        def mark(core: EngineCore) -> None:
            self._retiring[forward] = future

        self.call(mark)
        return future

    def expel(self, forward: str) -> Future[None]:
        """Takes a forward out at once; what it has in flight fails."""

        def drop(core: EngineCore) -> None:
            for request_id in core.scheduler.requests(forward):
                core.abort(request_id)
                self._deliver(TokenEvent(request_id, -1, -1, "failed"))
            if forward in core.forwards:
                core.detach(forward)

        return self.call(drop)

    def keep(self, forward: str) -> None:
        """Undoes `retire` for a forward that has not left yet. On the loop's thread only."""
        waiting = self._retiring.pop(forward, None)
        if waiting is not None:
            waiting.cancel()

    @property
    def retiring(self) -> tuple[str, ...]:
        return tuple(self._retiring)

    # on the loop's thread

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.error = error
            log.exception("the engine loop ended")
        finally:
            self._finish()

    def _turn(self) -> bool:
        with self._wake:
            while not (self._stopping or self._commands or self.core.has_work()):
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
            if self._stopping:
                self._commands.extend(commands)
                return False
        for command in commands:
            command()
        for event in self.core.step():
            self._deliver(event)
        for forward in [name for name in self._retiring if not self.core.has_work(name)]:
            self._retiring.pop(forward).set_result(self.core.detach(forward))
        return True

    def _deliver(self, event: TokenEvent) -> None:
        self.num_tokens += event.token >= 0
        deliver = self._listeners.pop(event.request_id) if event.finish else self._listeners[event.request_id]
        deliver(event)

    def _finish(self) -> None:
        """Nobody may wait for a thread that is gone."""
        with self._wake:
            self._stopping = True
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        for request_id, deliver in self._listeners.items():
            deliver(TokenEvent(request_id, -1, -1, "failed"))
        self._listeners.clear()
        for future in self._retiring.values():
            future.cancel()

    def snapshot(self) -> dict[str, Any]:
        """Figures for /metrics; read without the loop's thread, so they may be one step apart."""
        scheduler = self.core.scheduler
        return {
            "requests_running": scheduler.num_running,
            "requests_waiting": scheduler.num_waiting,
            "kv_blocks_free": scheduler.pool.num_free,
            "kv_blocks_total": scheduler.pool.capacity,
            "prefix_blocks": scheduler.pool.num_prefixes,
            "preemptions_total": scheduler.num_preemptions,
            "tokens_total": self.num_tokens,
        }
