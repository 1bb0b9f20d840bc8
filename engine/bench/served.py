"""The HTTP server in a process of its own, and a client that reads many streams at once. Token ids travel as text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tideforge.engine.bench.job import MODELS, Job, Load
from tideforge.engine.bench.report import Record
from tideforge.engine.bench.server import NAME
from tideforge.engine.bpe import tokenizer_json
from tideforge.engine.guard import has_ended
from tideforge.engine.lab import end_keeper
from tideforge.engine.tied import end_tied, start_tied
from tideforge.errors import TideforgeError

NEEDED = ("fastapi", "uvicorn", "tokenizers", "cryptography")  # the extra `serve`
START_S = 180.0
READ_S = 120.0  # without a line a stream has failed


def missing_packages() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


@dataclasses.dataclass(frozen=True)
class Stream:
    """One streamed answer. Times since the epoch, one a token; `problem` is empty when all of it came."""

    prompt: tuple[int, ...]
    sent_at: float
    tokens: tuple[int, ...]
    times: tuple[float, ...]
    problem: str = ""

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


@dataclasses.dataclass(frozen=True)
class Block:
    """Streams that were sent at once."""

    streams: tuple[Stream, ...]

    @property
    def seconds(self) -> float:
        return max(s.times[-1] for s in self.streams) - min(s.sent_at for s in self.streams)

    @property
    def decode_s(self) -> float:
        """From the time at which each has its first token."""
        return max(s.times[-1] for s in self.streams) - max(s.times[0] for s in self.streams)


@dataclasses.dataclass(frozen=True)
class Served:
    state: Path
    host: str
    port: int
    vocabulary: int

    def prompts(self, load: Load, seed: int) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(seed)
        return [tuple(rng.integers(3, self.vocabulary, load.prompt).tolist()) for _ in range(load.users)]

    def block(self, load: Load, seed: int) -> Block:
        """Raises TideforgeError when an answer does not come whole."""
        streams = asyncio.run(self._all(self.prompts(load, seed), load.output))
        if problems := [stream.problem for stream in streams if stream.problem]:
            raise TideforgeError(f"{len(problems)} of {len(streams)} streams failed: {problems[0]}")
        return Block(streams)

    async def _all(self, prompts: Sequence[tuple[int, ...]], output: int) -> tuple[Stream, ...]:
        return tuple(await asyncio.gather(*(self.stream(prompt, output) for prompt in prompts)))

    async def stream(
        self, prompt: tuple[int, ...], output: int, seen: Callable[[int], object] = lambda count: None
    ) -> Stream:
        """One answer of `output` tokens; `seen(number so far)` is called at each."""
        sent = time.time()
        tokens: list[int] = []
        times: list[float] = []
        ask = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async for text in lines(self.host, self.port, "/v1/completions", json.dumps(ask).encode()):
                event = json.loads(text)
                if "error" in event:
                    return Stream(prompt, sent, tuple(tokens), tuple(times), str(event["error"]["message"]))
                new = [int(token) for token in event["choices"][0]["text"].split()]
                tokens += new
                times += [time.time()] * len(new)
                seen(len(tokens))
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            return Stream(prompt, sent, tuple(tokens), tuple(times), f"{type(error).__name__}: {error}")
        short = "" if len(tokens) == output else f"{len(tokens)} of {output} tokens came"
        return Stream(prompt, sent, tuple(tokens), tuple(times), short)

    def ask(self, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON answer to a GET, or to a POST of `body`. Raises TideforgeError with what the server refused."""
        data = None if body is None else json.dumps(body).encode()
        head = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", data, head)
        try:
            with urllib.request.urlopen(request, timeout=READ_S) as answer:
                told: dict[str, Any] = json.loads(answer.read())
                return told
        except urllib.error.HTTPError as error:
            raise TideforgeError(f"{path}: {error.read().decode('utf-8', 'replace')[:500]}") from None


async def lines(host: str, port: int, path: str, body: bytes) -> Any:
    """The data of each server-sent event but the last one, [DONE]. Raises ValueError when the answer is none of 200."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.0\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await asyncio.wait_for(reader.readline(), READ_S)
        if b" 200 " not in status:
            raise ValueError(f"answered {status.decode().strip()}: {(await reader.read())[-300:].decode()}")
        while line := await asyncio.wait_for(reader.readline(), READ_S):
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield line[6:]
    finally:
        writer.close()


@contextlib.contextmanager
def serving(
    job: Job, record: Record, load: Load, prepare: Callable[[Path], None] = lambda state: None
) -> Iterator[Served]:
    """A server of `load`'s size; `prepare(state)` is called before it starts. The folder stays after an error."""
    state = job.state / f"{record.part}-served-{record.runs}"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    settings = job.settings(load, state)
    vocabulary = write_tokenizer(settings.model)
    prepare(state)
    raw = {"settings": settings.to_dict(), "forward": str(MODELS / load.forward)}
    (state / "bench.json").write_text(json.dumps(raw))
    command = [sys.executable, "-m", "tideforge.engine.bench.server", str(state / "bench.json")]
    pid = start_tied(command, state / "server.log")
    try:
        host, port = _address(state, pid)
        yield Served(state, host, port, vocabulary)
    finally:
        end_tied(pid)
        with contextlib.suppress(OSError):
            end_keeper(state)
    shutil.rmtree(state, ignore_errors=True)


def write_tokenizer(model: Path) -> int:
    """A tokenizer whose token 17 reads " 17", so that a stream's text is its token ids. The size of the vocabulary."""
    size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    path = model / "tokenizer.json"
    if not path.exists():
        path.write_text(json.dumps(tokenizer_json({f"\u0120{index}": index for index in range(size)}, [], {})))
    return size


def _address(state: Path, pid: int) -> tuple[str, int]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (state / "server.json").exists():
            host, _, port = json.loads((state / "server.json").read_text())["url"].rpartition("/")[2].partition(":")
            return host, int(port)
        if has_ended(pid):
            break
        time.sleep(0.05)
    raise TideforgeError(f"the server did not start; see {state / 'server.log'}")
