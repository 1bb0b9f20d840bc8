"""What the hourly watches say of an endpoint's log, and whether the stack under it changed since it was tuned."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from tideforge.data.files import read_json
from tideforge.tasks.endpoint import Endpoint

if TYPE_CHECKING:
    from tideforge.data.watches import Scores

HISTORY_WEEKS = 4
COUNT = "SELECT count(*) FROM requests WHERE epoch_us(arrival) >= ? AND epoch_us(arrival) < ?"
PACKAGES = ("torch", "triton", "vllm", "sglang", "tensorrt_llm", "numpy")
DRIVER = Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Watched:
    """Reasons that speak for drift, and figures: family -> its largest score. `skipped` says why nothing was judged."""

    reasons: tuple[str, ...]
    figures: dict[str, Any]
    skipped: str = ""


def watch_hours(db: duckdb.DuckDBPyConnection, tuned: float, now: float, alarming: bool) -> Watched:
    """The last whole hour before `now` against the weeks before `tuned` (seconds since the epoch).

    `alarming` says that the look before saw drift: then an alarm lasts until its score has fallen clearly.
    """
    from tideforge.data.drift_alarms import RELEASE
    from tideforge.data.hourly import HOUR_US, hourly_of
    from tideforge.data.watches import FAMILIES, LEAD, WEEK, Reference, thresholds

    begin, tuned_hour, end = (int(time // 3600) for time in (tuned - HISTORY_WEEKS * WEEK * 3600, tuned, now))
    if not db.execute(COUNT, [begin * HOUR_US, end * HOUR_US]).fetchall()[0][0]:
        return Watched((), {}, "no whole hour of requests")
    traffic = hourly_of(db, begin, end)
    weeks = (tuned_hour - traffic.first_hour) // WEEK
    if weeks < 2:
        return Watched((), {}, f"{max(weeks, 0)} whole weeks of history, 2 are needed")
    if traffic.first_hour + traffic.hours <= tuned_hour:
        return Watched((), {}, "no whole hour since the last profile")
    place = tuned_hour - traffic.first_hour
    history = traffic.part(place - weeks * WEEK, place)
    recent = traffic.part(max(0, traffic.hours - LEAD - 1), traffic.hours)
    found = Reference.of(history).scores(recent)
    limits = thresholds(float(history.requests[:, 0].mean()))
    figures = {family: top(found[family], limits[family]) for family in FAMILIES}
    least = RELEASE if alarming else 1.0
    reasons = tuple(said(family, figures[family]) for family in FAMILIES if figures[family]["ratio"] >= least)
    return Watched(reasons, figures)


def top(scores: Scores, limit: float) -> dict[str, Any]:
    """The watch of a family whose score is largest in the last hour."""
    last = scores.scores[-1]
    if not len(last):
        return {"watch": "", "score": 0.0, "excess": 0.0, "threshold": limit, "ratio": 0.0}
    place = int(last.argmax())
    score = float(last[place])
    excess = float(scores.excess[-1, place])
    return {
        "watch": scores.names[place], "score": score, "excess": excess, "threshold": limit, "ratio": score / limit,
    }  # fmt: skip


def said(family: str, figures: dict[str, Any]) -> str:
    return (
        f"{family}: {figures['watch']} differs by {figures['excess']:+.3f} from the same hours of the week "
        f"(score {figures['score']:.1f}, threshold {figures['threshold']:.1f})"
    )


def stack() -> dict[str, str]:
    """Versions of what the endpoint runs on here: driver, libraries, this project."""
    from tideforge import __version__

    found = {"tideforge": __version__}
    if DRIVER.is_file():
        found["driver"] = DRIVER.read_text().splitlines()[0].strip()
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def expected_gain(endpoint: Endpoint) -> tuple[float, str]:
    """(relative gain of a night, where it is from): the median of what nights measured, else the endpoint's guess."""
    import statistics

    from tideforge.tasks.facts import Night
    from tideforge.tasks.night import runs_root
    from tideforge.tasks.store import Run

    root, gains = runs_root(endpoint), []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and Run(folder).manifest("verify") is not None:
            score = Night.read(Run(folder)).score
            if score is not None and score.ratio is not None and math.isfinite(score.ratio):
                gains.append(max(0.0, score.ratio - 1))
    if gains:
        return statistics.median(gains), f"median of {len(gains)} nights"
    return endpoint.drift.expected_gain, "assumed: no night was measured yet"


def decisions(state: Path) -> list[dict[str, Any]]:
    """All records of looks, oldest first. UserError names one that is damaged."""
    folder = state / "drift"
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [read_json(path, checked, "remove it") for path in paths]


def checked(raw: Any) -> dict[str, Any]:
    """A record as it was, with what every look needs of the ones before."""
    return {**raw, "time": float(raw["time"]), "recompile": bool(raw["recompile"]), "drifted": bool(raw["drifted"]),
            "against": str(raw["against"]), "reason": str(raw["reason"])}  # fmt: skip
