"""One request from the API's side: into the loop, tokens to text, and never a block left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from tideforge.engine.blocks import chain_key, root_key
from tideforge.engine.scheduler import Request, TokenEvent
from tideforge.engine.serving.loop import EngineLoop
from tideforge.engine.serving.text import Detokenizer, StopStrings, Text
from tideforge.engine.serving.wire import ApiError

T = TypeVar("T")


class Traffic(Protocol):
    """data/log_writer.TrafficLog: takes one row a finished request, in the background."""

    def record(self, row: dict[str, Any]) -> None: ...


@dataclasses.dataclass
class Counters:
    """Requests that ended, by how. `failed` counts answers that the server owed and could not give."""

    stop: int = 0
    length: int = 0
    abort: int = 0
    failed: int = 0
    refused: int = 0

    def count(self, how: str) -> None:
        setattr(self, how, getattr(self, how) + 1)


@dataclasses.dataclass(frozen=True)
class Piece:
    text: str
    finish: str | None = None  # "stop" or "length"


class Generation:
    """`await start()`, iterate `pieces()`, and `close()` however it went: that aborts what has not finished."""

    def __init__(
        self,
        loop: EngineLoop,
        text: Text,
        request: Request,
        stops: tuple[str, ...],
        counters: Counters,
        log: Callable[[Generation], None],
    ) -> None:
        self.request, self.forward, self.finish = request, "", ""
        self.arrival = datetime.datetime.now(datetime.UTC)
        self.output: list[str] = []
        self.num_tokens = self.cached_tokens = 0
        self.first_s = self.last_s = 0.0  # since arrival
        self._loop, self._counters, self._log = loop, counters, log
        self._begin = time.monotonic()
        self._queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._detokenizer, self._stops = Detokenizer(text), StopStrings(stops)
        self._started = self._closed = False

    async def start(self) -> None:
        """Raises UserError when the request can never run."""
        here = asyncio.get_running_loop()

        def deliver(event: TokenEvent) -> None:
            here.call_soon_threadsafe(self._queue.put_nowait, event)

        self._started = True
        future = self._loop.submit(self.request, deliver)
        try:
            self.forward = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._loop.abort(self.request.id)  # queued behind the submission, should that have begun
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it becomes whole, the last piece with the finish reason. Raises ApiError 500 if the engine failed."""
        while not self.finish:
            event = await self._queue.get()
            if event.finish == "failed":
                self.finish = "failed"
                raise ApiError(
                    500, "the engine failed while answering; try again", None, "server_error", "engine_failed"
                )
            self._note(event)
            piece = self._text_of(event)
            if self._stops.hit:
                self.finish = "stop"
            elif event.finish:
                piece += self._stops.end()
                self.finish = event.finish
            self.output.append(piece)
            if piece or self.finish:
                yield Piece(piece, self.finish or None)

    def _note(self, event: TokenEvent) -> None:
        self.last_s = time.monotonic() - self._begin
        if self.num_tokens == 0:
            self.first_s, self.cached_tokens = self.last_s, event.cached_tokens
        self.num_tokens += 1

    def _text_of(self, event: TokenEvent) -> str:
        """A stop id counts as a token but is no text."""
        piece = "" if event.finish == "stop" else self._detokenizer.add(event.token)
        return self._stops.add(piece + (self._detokenizer.end() if event.finish else ""))

    def close(self) -> None:
        """Idempotent. A request that has not finished is aborted, and its blocks are free before the next step."""
        if self._closed or not self._started:
            return
        self._closed = True
        self.finish = self.finish or "abort"
        self._counters.count(self.finish)
        self._loop.abort(self.request.id)
        self._log(self)


def traffic_row(
    done: Generation, model: str, tenant: str | None, block_size: int, texts: tuple[str, str] | None
) -> dict[str, Any]:
    """A row of data/schema.py's log. Prefix hashes: the first 8 bytes of a hash chain over the prompt's full blocks."""
    key, hashes, prompt = root_key(""), [], done.request.prompt
    for start in range(0, len(prompt) - block_size + 1, block_size):
        key = chain_key(key, prompt[start : start + block_size])
        hashes.append(int.from_bytes(key[:8], "little"))
    row = {
        "request_id": done.request.id,
        "arrival": done.arrival,
        "prompt_tokens": len(prompt),
        "output_tokens": done.num_tokens,
        "cached_tokens": done.cached_tokens,
        "ttft_ms": done.first_s * 1e3 if done.num_tokens else None,
        "latency_ms": done.last_s * 1e3 if done.num_tokens else None,
        "model": model,
        "region": None,
        "tenant": tenant,
        "prefix_hashes": hashes,
        "finish_reason": done.finish,
    }
    return row if texts is None else {**row, "prompt_text": texts[0], "output_text": texts[1]}


async def unless_gone(work: Awaitable[T], receive: Callable[[], Awaitable[Any]]) -> T | None:
    """The result of `work`, or None as soon as the client has disconnected; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
