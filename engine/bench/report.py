"""What the parts leave behind: raw readings, one JSON object a line; and what is made of them: figures beside predictions.

A part appends to `<results>/<part>.jsonl` as it goes, so an interrupted one goes on where it was, on another day too. Every
figure is computed from these lines alone.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tideforge.engine.outcome import Trial
from tideforge.errors import UserError

Value = float | int | str | None
WIDEST = 48  # letters of a cell; longer text stands below its table
GPU_QUERY = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "memory.used",
    "temperature.gpu",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of a table. `prediction` was written before the first reading.

    `met` is None where there is no goal, or not `enough` readings to call it met.
    """

    name: str
    value: Value
    unit: str
    prediction: str
    goal: str = ""
    met: bool | None = None

    @classmethod
    def at_most(
        cls, name: str, value: float | None, unit: str, prediction: str, goal: float, enough: bool = True
    ) -> Figure:
        met = None if value is None else value <= goal
        return cls(name, value, unit, prediction, f"<= {goal:g}", None if met and not enough else met)

    @classmethod
    def at_least(cls, name: str, value: float | None, unit: str, prediction: str, goal: float) -> Figure:
        return cls(name, value, unit, prediction, f">= {goal:g}", None if value is None else value >= goal)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One trial as the service's archive holds it, and what the machine looked like after it. Times since the epoch."""

    label: str
    run: int  # which start of the part's service it belongs to
    trial: Trial
    turn_at: float = 0.0  # when the service took it up
    device_mib: float = 0.0  # in use on the GPU, by whatever process
    host_mib: float = 0.0  # of service and keeper
    descriptors: int = 0  # likewise
    threads: int = 0  # likewise

    @property
    def swap_s(self) -> float:
        """From the submission to the first timed step; only of one submitted while the queue was empty."""
        return max(0.0, self.turn_at - self.trial.submitted_at) + self.trial.swap_s

    @property
    def timed_by(self) -> float:
        """A time at which its first timed step had begun: checks of the answers and the worker's end come after the clock."""
        return self.ended_at - self.trial.clock_s

    @property
    def ended_at(self) -> float:
        return self.trial.finished_at or 0.0

    @property
    def passed(self) -> bool:
        return self.trial.figures is not None

    def to_line(self) -> dict[str, Any]:
        return {**vars(self), "kind": "trial", "trial": dataclasses.asdict(self.trial)}

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Reading:
        fields = {field.name for field in dataclasses.fields(cls)}
        raw = {name: value for name, value in line.items() if name in fields}
        return cls(**{**raw, "trial": Trial.from_json(json.dumps(line["trial"]))})


class Record:
    """The lines of one part; appending writes the file."""

    def __init__(self, folder: Path, part: str) -> None:
        self.part, self.path = part, folder / f"{part}.jsonl"
        self.lines: list[dict[str, Any]] = []
        if self.path.exists():
            for number, text in enumerate(self.path.read_text().splitlines(), 1):
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # torn by a kill
                self.lines.append(checked(line, f"{self.path}: line {number}"))

    def add(self, kind: str, **fields: Any) -> None:
        self._append({"kind": kind, **fields})

    def add_trial(self, reading: Reading) -> None:
        self._append(reading.to_line())

    def _append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        return next(iter(reversed(self.of(kind))), None)

    def trials(self, label: str = "") -> list[Reading]:
        """Those whose label begins so."""
        return [Reading.of_line(line) for line in self.of("trial") if line["label"].startswith(label)]

    @property
    def runs(self) -> int:
        return len(self.of("run"))


def checked(line: Any, place: str) -> dict[str, Any]:
    """UserError for what no part has written."""
    try:
        if str(line["kind"]) == "trial":
            Reading.of_line(line)
            str(line["label"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"is no reading ({type(error).__name__}: {error})"
        raise UserError(place, problem, "remove that line, or the file to measure anew") from None
    return dict(line)


def quantile(values: Sequence[float], share: float) -> float | None:
    from tideforge.engine.measure import percentile

    return percentile(values, share) if values else None


def failures(name: str, readings: Sequence[Reading]) -> Figure:
    """How many did not pass, and what became of them."""
    told = collections.Counter(str(reading.trial.outcome) for reading in readings if not reading.passed)
    text = ", ".join(f"{count} {outcome}" for outcome, count in told.most_common())
    return Figure(name, text or 0, "", "0")


def environment(device: str, gpu: int, commit: str) -> dict[str, Any]:
    """What the figures of one call depend on besides the source."""
    names = ("torch", "triton", "numpy", "tideforge")
    with open("/proc/loadavg") as file:
        load = file.read().split()[0]
    return {
        "commit": commit or checked_out(), "device": device, "cores": os.cpu_count(), "kernel": platform.release(),
        "python": platform.python_version(), "load_1min": float(load),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{name: installed(name) for name in names}, **(gpu_facts(gpu) if device == "cuda" else {}),
    }  # fmt: skip


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def checked_out() -> str:
    done = _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"])
    return done.strip() or "unknown"


def gpu_facts(gpu: int) -> dict[str, Any]:
    """Name, driver, clocks and use of one GPU, and the processes on it, from nvidia-smi."""
    told = _output(["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"])
    values = [value.strip() for value in told.strip().split(",")]
    others = _output(["nvidia-smi", f"--id={gpu}", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"])
    facts = dict(zip(GPU_QUERY, values, strict=False)) if len(values) == len(GPU_QUERY) else {}
    return {"gpu": facts, "gpu_processes": others.splitlines()}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def shown(value: Value) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 or isinstance(value, int) else f"{value:.4g}"


def table(part: str, figures: Sequence[Figure]) -> str:
    """Prediction and goal beside each figure, in columns."""
    head = ("", "seen", "predicted for an H200", "goal there", "")
    marks = {None: "", True: "met", False: "MISSED"}
    apart = [f for f in figures if isinstance(f.value, str) and len(f.value) > WIDEST]
    rows = [head] + [
        (f.name, f"{shown(f.value)} {f.unit if f.value is not None else ''}".strip(), f.prediction, f.goal, marks[f.met])
        for f in figures if f not in apart
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"== {part}", *lines, *(f"{f.name or '-'}: {f.value}" for f in apart)])
