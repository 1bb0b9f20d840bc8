"""What can become of a candidate, and the record of one trial. Plain records: no torch, no pydantic."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import Any

SLOW, FAST = "slow", "fast"  # tiers


class Outcome(StrEnum):
    """Closed. Derived from what was observed (exit, signal, deadline, comparison), never from what a candidate says."""

    PASSED = "passed"
    REFUSED = "refused"  # bad bundle: a missing forward.py, a path outside the folder, knobs that may not change
    SYNTAX_ERROR = "syntax_error"
    IMPORT_ERROR = "import_error"
    BUILD_ERROR = "build_error"
    FORWARD_ERROR = "forward_error"
    CAPTURE_ERROR = "capture_error"  # the forward runs, but not under CUDA graph capture
    WRONG_SHAPE = "wrong_shape"  # other logits than the tensor it was given
    NOT_FINITE = "not_finite"
    WRONG = "wrong"  # an emitted token's reference logit lies below the derived bound
    NOT_RUN = "not_run"  # logits were left untouched
    HUNG = "hung"
    CRASHED = "crashed"  # died of a signal
    EXITED = "exited"  # left by itself
    OUT_OF_MEMORY = "out_of_memory"
    WEIGHTS_WRITTEN = "weights_written"  # the kernel refused a store into them
    TOO_MUCH_OUTPUT = "too_much_output"  # printed or written to files
    LEFT_PROCESSES = "left_processes"  # of its own, still there after the last step, or too many at once
    LEFT_THREADS = "left_threads"
    MEMORY_GREW = "memory_grew"  # from step to step
    TOO_FAST = "too_fast"  # faster than the floor: an error, not a win
    FAILED_GATE = "failed_gate"  # of the cheap ones (ladder.py); the message names it
    CANCELLED = "cancelled"  # the search ended first
    NOT_MEASURED = "not_measured"  # the incumbent could not be measured beside it


UNJUDGED = frozenset({Outcome.CANCELLED, Outcome.NOT_MEASURED})  # these say nothing about the candidate


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a passed trial measured. The ratio is of its objective, output tokens/s unless the night has another, paired."""

    ratio: float  # above 1: the candidate is better
    ci_low: float
    ci_high: float
    pairs: int
    candidate_tps: float  # output tokens/s, median of the blocks
    incumbent_tps: float
    ttft_ms: float  # median over the requests of the candidate's blocks
    tps_per_user_p50: float
    tps_per_user_p90: float  # 1 / P90 of latency per output token


@dataclasses.dataclass(frozen=True)
class Trial:
    """One evaluation of one candidate on one tier."""

    id: str
    forward: str  # SHA-256 of the forward, hex
    tier: str
    submitter: str
    submitted_at: float  # seconds since the epoch
    outcome: Outcome | None = None  # None while queued or running
    message: str = ""
    figures: Figures | None = None
    queue_s: float = 0.0  # from its submission to its beginning
    wait_s: float = 0.0  # for a spare
    stage_s: float = 0.0  # import and build
    dry_s: float = 0.0  # compiling under a throwaway capture
    lock_s: float = 0.0  # from then on until the device was its alone: the trials before it were measured meanwhile
    check_s: float = 0.0
    capture_s: float = 0.0
    swap_s: float = 0.0  # from its beginning to its first timed step: all of the above but queue_s, lock_s included
    clock_s: float = 0.0
    gates_s: float = 0.0  # the ladder's; 0 where it was not asked
    finished_at: float | None = None
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.figures is not None) != (self.outcome is Outcome.PASSED):
            raise ValueError("a trial has figures exactly when it passed")

    @property
    def done(self) -> bool:
        return self.outcome is not None

    @property
    def device_s(self) -> float:
        """Seconds in which it was this trial that had the device: checks, captures, clock and gates."""
        return self.check_s + self.capture_s + self.clock_s + self.gates_s

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Trial:
        raw = json.loads(text)
        raw["outcome"] = Outcome(raw["outcome"]) if raw["outcome"] else None
        raw["figures"] = Figures(**raw["figures"]) if raw["figures"] else None
        return cls(**raw)

    @classmethod
    def read(cls, path: Path) -> Trial:
        return cls.from_json(path.read_text())
