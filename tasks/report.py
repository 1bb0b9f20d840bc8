"""Node `report`: every figure of a night, recomputed from the run folder and the archive. Nothing is carried along.

Fields (units in the names): service_starts, weight_loads, worker_starts count events of this night's engine;
candidates and outcomes count finished trials; best_ratio with ci_low and ci_high is the finalist's held-out score;
idle_s_while_queued is time in which a candidate waited and none was evaluated; http_tps_before and http_tps_after come
from the live server's A B B A.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tideforge.engine.events import read_events
from tideforge.engine.outcome import Trial
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.facts import Night, failed_gates, why_failed
from tideforge.tasks.store import Manifest, Run


def report(run: Run, endpoint: Endpoint) -> Manifest:
    """Writes `report-<sha>.json` and its manifest, and retries what MLflow missed."""
    from tideforge.tasks.track import sync

    started = time.time()
    sync(endpoint)
    facts = compute(run)
    output = run.write_json("report", facts)
    return run.finish("report", Night.read(run).hashes(), {"report": output}, facts, started)


def compute(run: Run) -> dict[str, Any]:
    """The one JSON object. A field whose stage did not run is None."""
    night = Night.read(run)
    events = night_events(run, night)
    counts = Counter(event["event"] for event in events)
    score, ship, verify = night.score, night.extra("ship"), night.extra("verify")
    return {
        "run": run.id,
        "endpoint": night.started.get("endpoint"),
        "reason": night.started.get("reason"),
        "result": result(night),
        "service_starts": counts["service_start"],
        "weight_loads": weight_loads(run, night, events),
        "worker_starts": counts["worker_start"],
        "candidates": sum(trial.done for trial in night.trials),
        "outcomes": night.outcomes,
        "served": night.served or None,
        "incumbent": night.incumbent or None,
        "finalist": night.finalist,
        "best_ratio": score.ratio if score else None,
        "ci_low": score.ci_low if score else None,
        "ci_high": score.ci_high if score else None,
        "held_out_pairs": score.pairs if score else None,
        "incumbent_tps": score.incumbent_tps if score else None,
        "finalist_tps": score.candidate_tps if score else None,
        "search_s": night.manifests["search"].seconds if "search" in night.manifests else None,
        "idle_s_while_queued": idle_while_queued(night.trials, events),
        "verified": bool((night.verdict or {}).get("passed", False)),
        "failed_gates": failed_gates(night.verdict),
        "approved_by": night.extra("approval").get("who"),
        "decision": night.extra("approval").get("decision"),
        "shipped": ship.get("shipped"),
        "http_tps_before": ship.get("http_tps_before"),
        "http_tps_after": ship.get("http_tps_after"),
        "failed_requests": ship.get("failed_requests"),
        "incumbent_vs_transformers": verify.get("incumbent_vs_transformers"),
        "linear_floor_ms": verify.get("linear_floor_ms"),
        "incumbent_decode_ms": verify.get("incumbent_decode_ms"),
        "wall_s": wall_s(night),
    }


def result(night: Night) -> str:
    """How the night ended, in a sentence."""
    if "search" not in night.manifests:
        return "the night has not searched yet"
    if not night.finalist:
        return "no candidate ships: none was faster than the incumbent beyond doubt"
    if "verify" not in night.manifests:
        return "the finalist is not verified yet"
    if night.verdict is None or not night.verdict.get("passed"):
        return f"no candidate ships: {why_failed(night.verdict or {})}"
    if night.extra("release").get("waits") is False:
        return f"no candidate ships: {night.extra('release')['problem']}"
    if "approval" not in night.manifests:
        return "waits for approval"
    if night.extra("approval").get("decision") != "approve":
        return f"no candidate ships: {night.extra('approval').get('why') or 'rejected'}"
    shipped = night.extra("ship").get("shipped")
    return (
        f"shipped {shipped}"
        if shipped
        else f"no candidate ships: {night.extra('ship').get('problem') or 'not shipped yet'}"
    )


def night_events(run: Run, night: Night) -> list[dict[str, Any]]:
    """Events of this night's engine while it searched. Workers that verification started later are not the search's."""
    end = night.manifests["search"].finished if "search" in night.manifests else float("inf")
    return [event for event in read_events(run.folder) if float(event["time"]) <= end]


def weight_loads(run: Run, night: Night, events: Sequence[Mapping[str, Any]]) -> int:
    """How often the weights that this night worked on were read: once when it found a keeper running, and each time since.

    The keeper outlives nights and logs to the state folder. It was found running when a worker started before a load.
    """
    begin = float(night.started["started"])
    end = night.manifests["search"].finished if "search" in night.manifests else float("inf")
    loads = [float(event["time"]) for event in read_events(run.folder.parent.parent) if event["event"] == "weight_load"]
    during = [time for time in loads if begin <= time <= end]
    workers = [float(event["time"]) for event in events if event["event"] == "worker_start"]
    found = bool(workers) and min(workers) < min(during, default=float("inf"))
    return len(during) + found


def idle_while_queued(trials: Sequence[Trial], events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which at least one submitted trial was unfinished and no trial was being evaluated."""
    waiting = merged([(trial.submitted_at, trial.finished_at) for trial in trials if trial.finished_at is not None])
    busy = merged(busy_spans(events))
    return round(sum(end - start for start, end in waiting) - overlap(waiting, busy), 3)


def busy_spans(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """From trial_start to trial_end; a start that nothing ends (the service was killed) counts to its next start."""
    spans: list[tuple[float, float]] = []
    opened: float | None = None
    for event in events:
        if event["event"] == "trial_start":
            opened = float(event["time"])
        elif event["event"] in ("trial_end", "service_start") and opened is not None:
            spans.append((opened, float(event["time"])))
            opened = None
    return spans


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Union of intervals, sorted and disjoint."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def overlap(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a_end, b_end) - max(a, b)) for a, a_end in left for b, b_end in right)


def wall_s(night: Night) -> float:
    """From the start of the run to the end of its last node, the wait for a person left out."""
    started = float(night.started["started"])
    last = max(manifest.finished for manifest in night.manifests.values())
    waited = 0.0
    if "release" in night.manifests and "approval" in night.manifests:
        waited = max(0.0, night.manifests["approval"].finished - night.manifests["release"].finished)
    return round(last - started - waited, 1)


def read_report(run: Run) -> dict[str, Any]:
    """What the night's own report said when it ended, for comparison with `compute`."""
    return dict(json.loads(run.path(run.need("report"), "report").read_text()))


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """For the table: field and value in words."""

    def words(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.4g}"
        if isinstance(value, Mapping):
            return ", ".join(f"{key} {count}" for key, count in value.items()) or "-"
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return [(name, words(value)) for name, value in facts.items()]
