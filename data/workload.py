"""A workload: the shapes of requests to replay, in a search part and a held-out part, and where their text comes from.

Plain records, so that the engine can take them without duckdb or pandas. Sampling from a profile is data/sample.py's.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class RequestShape:
    """One request to replay. `arrival_s` counts from the start of the replay; closed load ignores it."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Workload:
        raw = json.loads(text)
        for part in ("search", "held_out"):
            raw[part] = tuple(RequestShape(**shape) for shape in raw[part])
        raw["corpus"], raw["notes"] = tuple(raw["corpus"]), tuple(raw["notes"])
        return cls(**raw)

    @classmethod
    def read(cls, path: Path) -> Workload:
        return cls.from_json(path.read_text())
