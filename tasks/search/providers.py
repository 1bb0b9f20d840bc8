"""Models behind the official SDKs: OpenAI-compatible chat completions and Anthropic messages, one protocol for the loop."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tideforge.errors import MissingExtra, UserError
from tideforge.tasks.endpoint import AgentSpec
from tideforge.tasks.search.agent import (
    Cost,
    DeadlineReached,
    Message,
    Model,
    ModelRefused,
    ModelRejected,
    ModelUnreachable,
    ToolCall,
)
from tideforge.tasks.search.llm import SYSTEM
from tideforge.tasks.search.tools import SCHEMAS

MAX_ANSWER_TOKENS = 16_000
REQUEST_S = 300.0  # most that one request may take
TRIES = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0

T = TypeVar("T")


def make_model(spec: AgentSpec) -> Model:
    """UserError when the key, the model's name or the SDK is missing."""
    key = os.environ.get(spec.api_key_env)
    if not key:
        raise UserError(spec.api_key_env, "is not set", f"export it: agent {spec.name} reads its key from there")
    if not spec.model:
        raise UserError(f"agent {spec.name}", "has no model", "give `model` in the endpoint file")
    return AnthropicModel(spec, key) if spec.provider == "anthropic" else OpenAIModel(spec, key)


def cost_of(spec: AgentSpec, input_tokens: int, output_tokens: int) -> Cost:
    dollars = input_tokens * spec.dollars_per_million_input + output_tokens * spec.dollars_per_million_output
    return Cost(input_tokens, output_tokens, dollars / 1e6)


class Unusable(Exception):
    """The server answered, but not with what the protocol promises."""


class Retry:
    """Repeats a request while the provider is busy, slow or gone, within the time that is left."""

    def __init__(self, errors: Any, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.errors, self.first_pause_s = errors, first_pause_s

    def __call__(self, request: Callable[[float], T], timeout_s: float) -> T:
        """`request` gets the seconds it may take. Raises a Stop; which one says what was wrong."""
        deadline = time.monotonic() + timeout_s
        for attempt in range(1, TRIES + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineReached("the agent's time is over")
            try:
                return request(min(left, REQUEST_S))
            except self.errors.APIConnectionError as error:  # timeouts are among these
                problem, pause = f"{type(error).__name__}: {error}", self.pause_s(attempt, None)
            except self.errors.APIStatusError as error:
                if error.status_code not in (408, 409, 429) and error.status_code < 500:
                    raise ModelRejected(f"HTTP {error.status_code}: {error.message[:300]}") from error
                problem, pause = f"HTTP {error.status_code}", self.pause_s(attempt, error.response.headers)
            except (self.errors.APIError, Unusable, json.JSONDecodeError) as error:
                problem, pause = f"{type(error).__name__}: {error}", self.pause_s(attempt, None)
            if attempt < TRIES:
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        raise ModelUnreachable(f"{TRIES} tries: {problem[:300]}")

    def pause_s(self, attempt: int, headers: Mapping[str, str] | None) -> float:
        """What the server asks for, else doubling with jitter so that agents do not come back all at once."""
        try:
            return min(LONGEST_PAUSE_S, float((headers or {}).get("retry-after", "")))
        except ValueError:
            return float(min(LONGEST_PAUSE_S, self.first_pause_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)))


def usable(answer: Any, *parts: str) -> Any:
    """The answer, if it holds what is read from it. The SDKs do not check what a server sends."""
    missing = [part for part in parts if not getattr(answer, part, None)]
    if missing:
        raise Unusable(f"the server's answer holds no {', '.join(missing)}")
    return answer


class OpenAIModel:
    """Any server that speaks /chat/completions; `base_url` chooses it."""

    def __init__(self, spec: AgentSpec, key: str) -> None:
        try:
            import openai
        except ImportError:
            raise MissingExtra("openai", "agents") from None
        self.spec, self.retry = spec, Retry(openai)
        self.client = openai.OpenAI(api_key=key, base_url=spec.base_url, max_retries=0)
        self.tools = [{"type": "function", "function": schema} for schema in SCHEMAS]

    def query(self, messages: list[Message], timeout_s: float) -> tuple[Message, Cost]:
        wire: Any = [{"role": "system", "content": SYSTEM}, *map(_openai_message, messages)]
        create: Any = self.client.chat.completions.create
        # OpenAI's own newer models refuse max_tokens; other servers know nothing else.
        limit = {"max_tokens" if self.spec.base_url else "max_completion_tokens": MAX_ANSWER_TOKENS}

        def request(left: float) -> Any:
            return usable(
                create(model=self.spec.model, messages=wire, tools=self.tools, timeout=left, **limit), "choices"
            )

        answer = self.retry(request, timeout_s)
        choice, usage = answer.choices[0], answer.usage
        if choice.finish_reason == "content_filter" or choice.message.refusal:
            raise ModelRefused(choice.message.refusal or "the provider's filter stopped the answer")
        cost = cost_of(self.spec, usage.prompt_tokens, usage.completion_tokens) if usage else Cost()
        called = [call for call in choice.message.tool_calls or [] if call.type == "function"]
        calls = tuple(parsed(call.id, call.function.name, call.function.arguments) for call in called)
        return Message(
            "assistant", choice.message.content or "", calls, truncated=choice.finish_reason == "length"
        ), cost


def _openai_message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.text}
    wire: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _json_object(call)}}
            for call in message.calls
        ]
    return wire


def _json_object(call: ToolCall) -> str:
    """Some servers parse what they get back, so what was no JSON goes back as an empty object."""
    return json.dumps(dict(call.arguments or {}))


def parsed(identity: str, name: str, raw: str) -> ToolCall:
    try:
        arguments = json.loads(raw or "{}")
    except ValueError:
        arguments = None
    return ToolCall(identity, name, arguments if isinstance(arguments, dict) else None, raw)


class AnthropicModel:
    def __init__(self, spec: AgentSpec, key: str) -> None:
        try:
            import anthropic
        except ImportError:
            raise MissingExtra("anthropic", "agents") from None
        self.spec, self.retry = spec, Retry(anthropic)
        self.client = anthropic.Anthropic(api_key=key, base_url=spec.base_url, max_retries=0)
        self.tools = [
            {"name": s["name"], "description": s["description"], "input_schema": s["parameters"]} for s in SCHEMAS
        ]

    def query(self, messages: list[Message], timeout_s: float) -> tuple[Message, Cost]:
        wire: Any = anthropic_messages(messages)
        create: Any = self.client.messages.create
        fixed = {"model": self.spec.model, "system": SYSTEM, "tools": self.tools, "max_tokens": MAX_ANSWER_TOKENS}
        answer = self.retry(
            lambda left: usable(create(messages=wire, timeout=left, **fixed), "content", "usage"), timeout_s
        )
        if answer.stop_reason == "refusal":
            raise ModelRefused("the model refused")
        usage = answer.usage
        cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
        cost = cost_of(self.spec, usage.input_tokens + cached, usage.output_tokens)
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = tuple(_anthropic_call(block) for block in answer.content if block.type == "tool_use")
        cut = answer.stop_reason in ("max_tokens", "model_context_window_exceeded")
        return Message("assistant", text, calls, truncated=cut), cost


def _anthropic_call(block: Any) -> ToolCall:
    raw = json.dumps(block.input)
    return ToolCall(block.id, block.name, block.input if isinstance(block.input, dict) else None, raw)


def anthropic_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Roles must alternate, and the answers to one message's calls stand together in the next user message."""
    wire: list[dict[str, Any]] = []
    for message in messages:
        role, blocks = ("assistant" if message.role == "assistant" else "user"), _anthropic_blocks(message)
        if wire and wire[-1]["role"] == role:
            wire[-1]["content"] += blocks
        else:
            wire.append({"role": role, "content": blocks})
    return wire


def _anthropic_blocks(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "tool_result", "tool_use_id": message.call_id, "content": message.text}]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": message.text}] if message.text.strip() else []
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments or {})}
        for call in message.calls
    ]
    return blocks or [{"type": "text", "text": "(nothing)"}]
