"""The routes. Each turns HTTP into a Generation or a question to the Shipper; nothing here decides anything."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tideforge.engine import scheduler
from tideforge.engine.config import Limits, ModelConfig
from tideforge.engine.release import Decision
from tideforge.engine.serving import wire
from tideforge.engine.serving.generate import Counters, Generation, Piece, Traffic, traffic_row, unless_gone
from tideforge.engine.serving.loop import EngineLoop, LoopStopped
from tideforge.engine.serving.ship import Forbidden, Shipper
from tideforge.engine.serving.text import Text
from tideforge.engine.serving.wire import ApiError
from tideforge.errors import Refused, UserError

CLIENT_GONE = 499  # nobody reads it; the number that proxies log for a client that left


@dataclasses.dataclass
class Live:
    """What the routes work with."""

    name: str  # the model's name in the API: the endpoint's
    config: ModelConfig
    limits: Limits
    text: Text
    loop: EngineLoop
    shipper: Shipper
    traffic: Traffic | None = None
    keep_text: bool = False
    note: str = ""
    counters: Counters = dataclasses.field(default_factory=Counters)
    started: float = dataclasses.field(default_factory=time.time)

    def generation(self, ask: wire.Common, prompt: tuple[int, ...], default_max: int | None, shown: str) -> Generation:
        """Raises ApiError 400 for a prompt that cannot be served."""
        room = self.limits.max_model_len - len(prompt)
        self._check(prompt, ask.max_tokens or default_max or 1, room)
        request = scheduler.Request(
            id=uuid.uuid4().hex,
            prompt=prompt,
            max_tokens=ask.max_tokens or min(default_max or room, room),
            sampling=ask.sampling,
            stop_ids=() if ask.ignore_eos else self.config.eos_token_ids,
        )

        def log(done: Generation) -> None:
            if self.traffic is not None and done.finish != "failed":
                texts = (shown, "".join(done.output)) if self.keep_text else None
                size = self.loop.core.pool.block_size
                self.traffic.record(traffic_row(done, self.name, ask.user, size, texts))

        return Generation(self.loop, self.text, request, ask.stop, self.counters, log)

    def _check(self, prompt: tuple[int, ...], max_tokens: int, room: int) -> None:
        if not prompt:
            raise ApiError(400, "the prompt is empty: give at least one token", "prompt")
        if not all(0 <= token < self.config.vocab_size for token in prompt):
            raise ApiError(400, f"the prompt holds a token id outside 0..{self.config.vocab_size - 1}", "prompt")
        if max_tokens > room:
            limit = self.limits.max_model_len
            message = f"{len(prompt)} prompt tokens and {max_tokens} to answer exceed this model's context of {limit}"
            raise ApiError(400, message, "max_tokens", code="context_length_exceeded")

    def check_model(self, model: str) -> None:
        if model != self.name:
            raise ApiError(
                404, f"the model {model!r} is not served here; {self.name!r} is", "model", code="model_not_found"
            )

    def version(self) -> dict[str, Any]:
        identity = self.shipper.identity
        return {
            "endpoint": identity.endpoint,
            "forward": self.loop.current,
            "release": self.shipper.release,
            "weights_sha256": identity.weights_sha256,
            "launch": identity.launch,
            "environment": dict(identity.environment),
            "pid": os.getpid(),
            "started": self.started,
            "draining": list(self.loop.retiring),
            "note": self.note,
        }


class Shape:
    """How the answers of one of the two endpoints look."""

    def __init__(self, chat: bool, model: str, request_id: str) -> None:
        self.chat = chat
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }
        self._object = "chat.completion" if chat else "text_completion"

    def whole(self, text: str, finish: str, usage: dict[str, Any]) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self.head, "object": self._object, "choices": [choice], "usage": usage}

    def chunk(self, text: str, finish: str | None, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        content = {"delta": {**role, "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self._chunk_head, "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk_head, "choices": [], "usage": usage}

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self.head, "object": self._object + (".chunk" if self.chat else "")}


class EventStream(StreamingResponse):
    """Server-sent events that end, with their generation, when the client goes away, also before the first byte."""

    def __init__(self, events: AsyncIterator[str], done: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self.stream_response(send), receive)
        finally:
            self._done()


def usage_of(generation: Generation) -> dict[str, Any]:
    return wire.usage(len(generation.request.prompt), generation.num_tokens, generation.cached_tokens)


async def answer(live: Live, http: Request, ask: wire.Common, generation: Generation) -> Response:
    """Starts the generation and gives it back whole or as a stream."""
    shape = Shape(isinstance(ask, wire.ChatRequest), live.name, generation.request.id)
    try:
        await generation.start()
    except BaseException:
        generation.close()
        raise
    if ask.stream:
        return EventStream(sse(generation, shape, ask.wants_usage), generation.close)
    try:
        pieces = await unless_gone(collect(generation), http.receive)
    finally:
        generation.close()
    if pieces is None:
        return Response(status_code=CLIENT_GONE)
    text = "".join(piece.text for piece in pieces)
    return JSONResponse(shape.whole(text, generation.finish, usage_of(generation)))


async def collect(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation.pieces()]


async def sse(generation: Generation, shape: Shape, wants_usage: bool) -> AsyncIterator[str]:
    first = True
    try:
        async for piece in generation.pieces():
            yield event(shape.chunk(piece.text, piece.finish, first))
            first = False
    except ApiError as error:
        yield event(error.body)
        return
    if wants_usage:
        yield event(shape.usage_chunk(usage_of(generation)))
    yield "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def create_app(live: Live) -> FastAPI:
    app = FastAPI(title="Tideforge", docs_url=None, redoc_url=None)
    add_error_answers(app, live)
    add_generation(app, live)
    add_facts(app, live)
    add_admin(app, live)
    return app


def add_generation(app: FastAPI, live: Live) -> None:
    @app.post("/v1/completions")
    async def completions(ask: wire.CompletionRequest, http: Request) -> Response:
        live.check_model(ask.model)
        prompt = ask.one_prompt
        ids = live.text.encode(prompt) if isinstance(prompt, str) else prompt
        shown = prompt if isinstance(prompt, str) else live.text.decode(ids) if live.keep_text else ""
        return await answer(live, http, ask, live.generation(ask, ids, wire.DEFAULT_MAX_TOKENS, shown))

    @app.post("/v1/chat/completions")
    async def chat_completions(ask: wire.ChatRequest, http: Request) -> Response:
        live.check_model(ask.model)
        messages = [(message.role, message.text) for message in ask.messages]
        shown = "\n".join(f"{role}: {text}" for role, text in messages)
        return await answer(live, http, ask, live.generation(ask, live.text.chat(messages), None, shown))


def add_facts(app: FastAPI, live: Live) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": live.name, "object": "model", "created": int(live.started), "owned_by": "tideforge"}
        return {"object": "list", "data": [entry]}

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return live.version()

    @app.get("/health")
    async def health() -> Response:
        if live.loop.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine loop has ended"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        figures = {**live.loop.snapshot(), "requests_failed_total": live.counters.failed}
        lines = [f"tideforge_{name} {value}" for name, value in figures.items()]
        lines += [f'tideforge_requests_total{{finish="{how}"}} {count}' for how, count in vars(live.counters).items()]
        return PlainTextResponse("\n".join(lines) + "\n")


def add_admin(app: FastAPI, live: Live) -> None:
    """The signature is the right to use these: nothing else is asked, and without one nothing happens."""

    @app.post("/admin/ship")
    async def ship(ask: wire.ShipRequest) -> dict[str, Any]:
        return await asyncio.to_thread(live.shipper.ship, ask.record, ask.signature)

    @app.post("/admin/rollback")
    async def rollback(ask: wire.ShipRequest) -> dict[str, Any]:
        return await asyncio.to_thread(live.shipper.ship, ask.record, ask.signature, Decision.ROLLBACK)

    @app.post("/admin/flip")
    async def flip(ask: wire.FlipRequest) -> dict[str, Any]:
        return await asyncio.to_thread(live.shipper.flip, ask.nonce, ask.to, ask.done)


def add_error_answers(app: FastAPI, live: Live) -> None:
    def reply(status: int, body: dict[str, Any]) -> JSONResponse:
        live.counters.refused += status < 500 and status != CLIENT_GONE
        return JSONResponse(body, status)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return reply(error.status, error.body)

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> Response:
        return reply(400, wire.error_body(str(error), "invalid_request_error"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = "the body is not JSON" if first["type"] == "json_invalid" else f"{where}: {first['msg']}"
        return reply(400, wire.error_body(message, "invalid_request_error", where or None))

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        status, code = (403, "forbidden") if isinstance(error, Forbidden) else (409, "conflict")
        return reply(status, wire.error_body(str(error), "release_refused", None, code))

    @app.exception_handler(LoopStopped)
    async def stopped(_: Request, error: LoopStopped) -> Response:
        live.counters.failed += 1
        return reply(503, wire.error_body(str(error), "server_error", None, "stopping"))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return reply(error.status_code, wire.error_body(str(error.detail), "invalid_request_error"))
