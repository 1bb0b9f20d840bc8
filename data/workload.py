"""A workload: the shapes of requests to replay, in a search part and a held-out part, and where their text comes from.

Plain records, so that the engine can take them without duckdb or pandas. Sampling from a profile is data/sample.py's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.data.files import read_json


@dataclasses.dataclass(frozen=True)
class Turn:
    """A later turn of a conversation: `think_s` after the last answer its user adds `new_tokens` to all that was said."""

    new_tokens: int
    output_tokens: int
    think_s: float


@dataclasses.dataclass(frozen=True)
class RequestShape:
    """One request to replay, or with `turns` the first of a conversation.

    `arrival_s` counts from the start of the replay; closed load ignores it.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    turns: tuple[Turn, ...] = ()

    @property
    def context_tokens(self) -> int:
        """At the end of its last turn."""
        return self.prompt_tokens + self.output_tokens + sum(t.new_tokens + t.output_tokens for t in self.turns)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RequestShape:
        return cls(**{**raw, "turns": tuple(Turn(**turn) for turn in raw.get("turns", ()))})


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a trial replays. Prompts are spans of `corpus` (token ids of real text) drawn when the clock starts.

    The two parts share neither requests nor corpus: the search part draws from the first half of the corpus, the
    held-out part from the second.
    """

    users: int
    search: tuple[RequestShape, ...]
    held_out: tuple[RequestShape, ...]
    corpus: tuple[int, ...]
    profile: str  # hash of the profile that it was sampled from
    seed: int
    notes: tuple[str, ...] = ()  # what scaling down lost, in words
    context_p99: int = 0  # prompt and output tokens of the profile's requests, not scaled; 0: not known

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Workload:
        for part in ("search", "held_out"):
            raw[part] = tuple(RequestShape.from_dict(shape) for shape in raw[part])
        raw["corpus"], raw["notes"] = tuple(raw["corpus"]), tuple(raw["notes"])
        return cls(**raw)

    @classmethod
    def read(cls, path: Path) -> Workload:
        """UserError when the file is damaged."""
        return read_json(path, cls.of, "remove it and run the node workload again")
