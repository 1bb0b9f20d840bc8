"""What can become of a candidate, and the record of one trial. Plain records: no torch, no pydantic."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from tideforge.data.files import read_json

T = typing.TypeVar("T")

SLOW, FAST = "slow", "fast"  # tiers
AGAIN = "stop and start its engine, which sets the file aside and tries the candidate again"


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
    """What a passed trial measured, paired. The ratio is of the objective, and above 1 where the candidate is better."""

    ratio: float  # of "less is better" it is incumbent / candidate, else candidate / incumbent
    ci_low: float
    ci_high: float
    pairs: int
    candidate_tps: float  # output tokens/s, median of the blocks
    incumbent_tps: float
    ttft_ms: float  # median over the requests of the candidate's blocks
    tps_per_user_p50: float
    tps_per_user_p90: float  # 1 / P90 of latency per output token
    objective: str = ""  # that the ratio is of (objective.FIGURES); empty where it was not written down
    better: str = ""  # "more" or "less", of the objective's own figure
    unit: str = ""  # of the two below
    candidate: float | None = (
        None  # the objective's figure, median of the blocks; None on the fast tier: the ratio is of layers
    )
    incumbent: float | None = None

    @property
    def told(self) -> str:
        """Ratio, objective, direction and the candidate's figure, for people."""
        objective, own = "an objective that was not written down", f"{self.candidate_tps:.1f} output tokens/s"
        if self.objective:
            objective = f"{self.objective} ({self.better} is better)"
        if self.candidate is not None and self.incumbent is not None:
            own = f"{self.candidate:.4g} {self.unit} against the incumbent's {self.incumbent:.4g}"
        return f"{self.ratio:.4f} [{self.ci_low:.4f}, {self.ci_high:.4f}] times as good by {objective}: {own}"


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
    setting: str = ""  # id of what it was measured against (setting.py); empty where it was not written down

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
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Trial:
        """Raises ValueError, KeyError or TypeError when it is the record of no trial."""
        outcome = Outcome(raw["outcome"]) if raw.get("outcome") else None
        figures = of_types(Figures(**raw["figures"])) if raw.get("figures") else None
        return of_types(cls(**{**raw, "outcome": outcome, "figures": figures}))

    @classmethod
    def read(cls, path: Path, remedy: str = AGAIN) -> Trial:
        """Of a trial's own folder. UserError when the file is damaged or another trial's."""
        return read_json(path, lambda raw: cls.of(raw)._in(path.parent.name), remedy)

    def _in(self, folder: str) -> Trial:
        if self.id != folder:
            raise ValueError(f"it is of the trial {self.id}")
        return self


@functools.cache
def _types(kind: Any) -> dict[str, tuple[type, ...]]:
    """What each field of a record may hold; an int does for a float."""
    allowed = {}
    for name, hint in typing.get_type_hints(kind).items():
        hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = tuple(typing.get_origin(one) or one for one in hints)
        allowed[name] = (*plain, int) if float in plain else plain
    return allowed


def of_types(record: T) -> T:
    """The record. TypeError where a field holds something else than it is declared as: JSON may hold anything."""
    kind: Any = type(record)
    for name, allowed in _types(kind).items():
        if not isinstance(value := getattr(record, name), allowed):
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    return record
