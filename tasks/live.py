"""The running server over HTTP: tokens/s under load, and a flip while streams are open whose outputs are checked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tideforge.errors import Refused, UserError
from tideforge.tasks.endpoint import Endpoint

TIMEOUT_S = 300.0
CHECK_S = 10.0  # a server that is up says so at once
SPARE_SLOTS = 4  # a slot between two requests is not open: more slots than the streams that must be open at a flip


@dataclasses.dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    max_tokens: int
    model: str  # as GET /v1/models names it


@dataclasses.dataclass(frozen=True)
class Answer:
    """One streamed completion. Times in seconds since the epoch; `problem` is empty when it came whole."""

    prompt: int  # index into the prompts
    text: str
    tokens: int
    sent_at: float
    first_at: float
    finished_at: float
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class HttpFigures:
    tokens_per_s: float  # output tokens of whole answers / wall time of the block
    failed: int
    requests: int
    tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Flip:
    """What the streams around a flip saw."""

    answer: dict[str, Any]  # the server's, with the status under "status"
    posted_at: float
    flipped_at: float
    streams: tuple[Answer, ...]

    @property
    def open_streams(self) -> int:
        return sum(one.first_at < self.flipped_at < one.finished_at for one in self.streams if not one.problem)


Texts = Mapping[int, frozenset[str]]  # prompt -> what one forward answers to it when nothing flips


def server_url(state: Path) -> str:
    try:
        return str(json.loads((state / "server.json").read_text())["url"]).rstrip("/")
    except (OSError, ValueError, KeyError):
        raise UserError(
            str(state / "server.json"), "names no server", "start it: `tideforge serve` or `tideforge up`"
        ) from None


def ask(method: str, url: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The JSON answer of the server. Refused with its reason when it says no; UserError when it is not there."""
    try:
        answer = httpx.request(method, url, json=body, timeout=timeout_s)
        told = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(
            url, f"does not answer as the server does ({type(error).__name__})", "look whether it runs"
        ) from None
    if answer.status_code != 200 or not isinstance(told, dict):
        raise Refused(reason(told, answer.status_code))
    return told


def reason(told: Any, status: int) -> str:
    error = told.get("error", told.get("detail")) if isinstance(told, dict) else told
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text or f"the server answered {status}")


def version(state: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """GET /version. UserError when a field is missing that a release needs."""
    url = f"{server_url(state)}/version"
    told = ask("GET", url, timeout_s=timeout_s)
    missing = {"forward", "release", "weights_sha256", "launch", "environment"} - set(told)
    if missing:
        raise UserError(url, f"lacks {', '.join(sorted(missing))}", "run a server of this version of tideforge")
    return told


def check_server(endpoint: Endpoint, file: str) -> None:
    """Raises UserError unless a server serves this endpoint as its file says: else the night's release can go nowhere."""
    name, remedy = (
        f"endpoint {endpoint.name}",
        f"`tideforge serve --endpoint {file}` starts one, --no-ship does without",
    )
    try:
        told = version(endpoint.state, CHECK_S)
    except UserError as error:
        raise UserError(name, f"no server serves it ({error.thing} {error.problem})", remedy) from None
    except Refused as refusal:
        raise UserError(name, f"no server serves it ({refusal})", remedy) from None
    for what, own in (("endpoint", endpoint.name), ("launch", endpoint.launch)):
        if told.get(what) != own:
            problem = f"its server runs with another {what}: {told.get(what)!r}"
            raise UserError(
                name, problem, "restart the server with this endpoint file, or leave the release out: --no-ship"
            )


def environment_of(told: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The server's environment as a release carries it, sorted."""
    return tuple(sorted((str(name), str(value)) for name, value in told["environment"].items()))


def model_name(url: str) -> str:
    return str(ask("GET", f"{url}/v1/models")["data"][0]["id"])


async def complete(
    client: httpx.AsyncClient, prompts: Sequence[Prompt], index: int, first: Callable[[], None] = lambda: None
) -> Answer:
    """Streams a greedy completion of prompts[index]; `first` is called at its first chunk."""
    prompt, sent = prompts[index], time.time()
    body = {
        "model": prompt.model, "prompt": list(prompt.tokens), "max_tokens": prompt.max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    text, tokens, first_at, problem = "", 0, 0.0, "the stream ended early"
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return Answer(index, "", 0, sent, 0.0, time.time(), f"status {response.status_code}")
            async for line in response.aiter_lines():
                if line.strip() == "data: [DONE]":
                    problem = "" if tokens else "no usage was sent"
                elif line.startswith("data:"):
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        problem = reason(chunk, 200)
                        break
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                    piece = "".join(choice.get("text", "") for choice in chunk.get("choices", []))
                    if chunk.get("choices") and not first_at:
                        first_at = time.time()
                        first()
                    text += piece
    except (httpx.HTTPError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    return Answer(index, text, tokens, sent, first_at, time.time(), problem)


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)


async def _all(url: str, prompts: Sequence[Prompt], concurrency: int) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)
    async with _client(url) as client:

        async def one(index: int) -> Answer:
            async with gate:
                return await complete(client, prompts, index)

        return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def measure_http(url: str, prompts: Sequence[Prompt], concurrency: int) -> HttpFigures:
    """Closed load: `concurrency` users work through the prompts once."""
    started = time.perf_counter()
    answers = asyncio.run(_all(url, prompts, concurrency))
    seconds = time.perf_counter() - started
    whole = [one for one in answers if not one.problem]
    tokens = sum(one.tokens for one in whole)
    return HttpFigures(tokens / seconds, len(answers) - len(whole), len(answers), tokens, seconds)


def texts(url: str, prompts: Sequence[Prompt]) -> Texts:
    """What the forward that serves answers when nothing flips: one by one, and side by side.

    Both count as right, since another batch size may settle a tie of two logits otherwise. Raises Refused when the
    server fails to answer: then there is nothing to compare with.
    """
    serial = asyncio.run(_all(url, prompts, 1))
    together = asyncio.run(_all(url, prompts, len(prompts)))
    failed = [one.problem for one in (*serial, *together) if one.problem]
    if failed:
        raise Refused(f"the server failed before any flip: {failed[0]}")
    return {a.prompt: frozenset({a.text, b.text}) for a, b in zip(serial, together, strict=True)}


def flip_under_streams(url: str, prompts: Sequence[Prompt], path: str, body: Any, streams: int = 8) -> Flip:
    """POSTs `body` to `path` while at least `streams` completions are in mid-answer; slots stream until it is done."""
    return asyncio.run(_flip(url, prompts, path, body, streams + SPARE_SLOTS))


async def _flip(url: str, prompts: Sequence[Prompt], path: str, body: Any, slots: int) -> Flip:
    begun, over = [asyncio.Event() for _ in range(slots)], asyncio.Event()
    async with _client(url) as client:

        async def slot(number: int) -> list[Answer]:
            answers: list[Answer] = []
            while not over.is_set():
                answers.append(
                    await complete(client, prompts, (number + len(answers)) % len(prompts), begun[number].set)
                )
                begun[number].set()  # a failed stream must not keep the flip waiting
                if answers[-1].problem:
                    break
            return answers

        tasks = [asyncio.create_task(slot(number)) for number in range(slots)]
        try:
            await asyncio.gather(*(event.wait() for event in begun))
            posted = time.time()
            response = await client.post(path, json=body)
            answered = time.time()
        finally:
            over.set()
            seen = await asyncio.gather(*tasks)
    told = _json(response)
    flipped = float(told.get("flipped_at") or answered)
    return Flip({**told, "status": response.status_code}, posted, flipped, tuple(one for many in seen for one in many))


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        told = response.json()
    except ValueError:
        told = response.text[:200]
    return told if isinstance(told, dict) else {"error": told}


def wrong_streams(flip: Flip, old: Texts, new: Texts) -> list[str]:
    """Streams whose text no forward gives unflipped, or only the one that did not begin it.

    Sent before the flip was asked for: the old forward must have finished it. Sent while it was under way: either.
    """
    wrong = []
    for one in flip.streams:
        allowed = old[one.prompt] if one.sent_at < flip.posted_at else old[one.prompt] | new[one.prompt]
        if not one.problem and one.text not in allowed:
            wrong.append(f"prompt {one.prompt}: {one.text[:60]!r} instead of {min(allowed)[:60]!r}")
    return wrong
