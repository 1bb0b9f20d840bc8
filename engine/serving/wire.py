"""What travels over HTTP: OpenAI's request and answer shapes, and its error shape. Unknown parameters are refused."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from tideforge.engine.scheduler import Sampling

MAX_STOPS = 4
DEFAULT_MAX_TOKENS = 16  # of the completions API; a chat may fill the context


class ApiError(Exception):
    """Becomes an answer with this status and {"error": {message, type, param, code}}."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, param, code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(Wire):
    include_usage: bool = False
    include_obfuscation: bool = False


class Common(Wire):
    """Parameters of both endpoints. Those of the last group are accepted only at the value that changes nothing."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: tuple[str, ...] = Field(default=(), max_length=MAX_STOPS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool = Field(default=False, description="go on to max_tokens: for measurements")

    n: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    logit_bias: None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "stream", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        value = cls.model_fields[info.field_name].default if value is None else value
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @model_validator(mode="after")
    def _options_need_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        return self

    @property
    def sampling(self) -> Sampling:
        """Without a seed one is drawn, so that equal requests differ as they should."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return Sampling(self.temperature, self.top_p, seed)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Common):
    prompt: str | tuple[int, ...] | tuple[str] | tuple[tuple[int, ...]]
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def one_prompt(self) -> str | tuple[int, ...]:
        prompt = self.prompt
        if isinstance(prompt, tuple) and len(prompt) == 1 and not isinstance(prompt[0], int):
            return prompt[0]
        return prompt  # type: ignore[return-value]


class TextPart(Wire):
    type: Literal["text"]
    text: str


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Common):
    messages: tuple[Message, ...] = Field(min_length=1)
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    logprobs: Literal[False] | None = None
    top_logprobs: None = None


class ShipRequest(Wire):
    """A release record, and the approver's one-time code, which is the signature over it."""

    record: dict[str, Any]
    signature: str = Field(validation_alias=AliasChoices("signature", "code"))


class FlipRequest(Wire):
    """For measuring: serve either forward of the release shipped last."""

    nonce: str
    to: str
    done: bool = False  # the last one: no flip of this release after it


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
