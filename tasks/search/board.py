"""The board: an append-only JSONL file through which agents share hypotheses and results."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from tideforge.errors import TideforgeError

KINDS = ("hypothesis", "result", "note")
MAX_LINE_BYTES = 4096  # one write of this size to a local file is not interleaved with another agent's


class BoardError(TideforgeError):
    """A post that the board does not take; the message says why."""


@dataclasses.dataclass(frozen=True)
class Post:
    """`rewrites` names what the candidate of `trial` is made of, where its author works with named rewrites."""

    author: str
    kind: str
    text: str
    trial: str | None = None
    rewrites: tuple[str, ...] = ()
    time: float = 0.0  # seconds since the epoch

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BoardError(f"kind {self.kind!r}: one of {', '.join(KINDS)}")


class Board:
    """Any number of processes may post and read at once. A line torn by a kill costs only itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def post(self, author: str, kind: str, text: str, trial: str | None = None, rewrites: tuple[str, ...] = ()) -> Post:
        """Appends one post with a single write. BoardError for an unknown kind or more than MAX_LINE_BYTES."""
        post = Post(author, kind, text, trial, tuple(rewrites), time.time())
        # The newline in front ends a line that a killed writer may have left torn.
        line = ("\n" + json.dumps(dataclasses.asdict(post), ensure_ascii=False) + "\n").encode()
        if len(line) > MAX_LINE_BYTES:
            raise BoardError(f"a post is at most {MAX_LINE_BYTES} bytes, this one has {len(line)}: shorten its text")
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        return post

    def posts(self) -> list[Post]:
        """Every whole post, in the order in which they were written."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return []
        parsed = (_parse(line) for line in raw.split(b"\n"))
        return [post for post in parsed if post is not None]


def _parse(line: bytes) -> Post | None:
    """None for an empty, torn or foreign line: anybody with the file's path may have written it."""
    try:
        raw: Any = json.loads(line)
        rewrites = tuple(str(name) for name in raw.get("rewrites", ()))
        trial = raw.get("trial")
        return Post(
            author=str(raw["author"]),
            kind=str(raw["kind"]),
            text=str(raw["text"]),
            trial=None if trial is None else str(trial),
            rewrites=rewrites,
            time=float(raw.get("time", 0.0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, BoardError):
        return None
