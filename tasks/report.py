"""Node `report`: every figure of a night, recomputed from its raw records. What the nodes summed up is not believed.

Fields (units in the names): service_starts, weight_loads, worker_starts count events of this night's engine;
candidates counts the forwards whose trials ended, outcomes and tiers those trials; best_ratio with ci_low and ci_high is
the finalist's held-out score, of held_out_objective; search_objective is what trials measured;
device_s are the seconds in which a trial had the device (check, capture, clock, gates), ladder_share what part of them on
the slow tier the cheap gates took; gates_s and flags are verification's, of all gates and for a person to look at;
idle_s_while_queued is time in which a candidate waited and none was evaluated; http_tps_before, http_tps_after and
failed_requests come from the live server's A B B A; approved_by and decision from a signature that holds; shipped from
the signed release on file and the server's own answer. search_s and wall_s are the clock of the nodes' manifests.

weight_loads counts the keeper's weights, which the server and every worker map: the load that this night found in
memory and each since. Processes that read weights of their own are not in it: the reference, which computes in float32
on a copy of its own, and the comparison with transformers, which loads the model for itself. None: no event tells of
that load.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tideforge.engine.events import FILE, read_events
from tideforge.engine.outcome import Figures, Trial
from tideforge.errors import UserError
from tideforge.tasks import evidence
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.facts import Night, failed_gates, why_failed
from tideforge.tasks.search.search import finalist as choose
from tideforge.tasks.store import Manifest, Run


def report(run: Run, endpoint: Endpoint) -> Manifest:
    """Writes `report-<sha>.json` and its manifest, and retries what MLflow missed."""
    from tideforge.tasks.track import sync

    started = time.time()
    sync(endpoint)
    facts = compute(run)
    output = run.write_json("report", facts)
    return run.finish("report", Night.read(run).hashes(), {"report": output}, facts, started)


@dataclasses.dataclass(frozen=True)
class Found:
    """What the raw records of a night say, before it is put in words."""

    night: Night
    trials: tuple[Trial, ...]
    finalist: str | None
    verdict: Mapping[str, Any] | None
    score: Figures | None
    approval: evidence.Approval | None
    live: Mapping[str, Any] | None
    shipped: str | None

    @classmethod
    def read(cls, run: Run) -> Found:
        night = Night.read(run)
        manifests = night.manifests
        evidence.check_chain(run, manifests)
        trials, verdict = evidence.read_trials(run, manifests.get("search")), night.verdict
        approval = evidence.approval(run, manifests)
        live = evidence.output(run, manifests.get("ship"), "live")
        shipped = evidence.shipped(run, approval, live)
        return cls(night, trials, finalist(night, trials), verdict, night.score, approval, live, shipped)

    @property
    def verified(self) -> bool:
        """The rule of a verdict that passes, asked of its gates and pairs."""
        verdict, score = self.verdict, self.score
        if not verdict or verdict.get("unverified") or score is None:
            return False
        return not failed_gates(verdict) and not evidence.missing_gates(verdict) and score.ci_low > 1


def finalist(night: Night, trials: Sequence[Trial]) -> str | None:
    """The search's choice, made again from its trials; what verification examined must be the same."""
    if "search" not in night.manifests:
        return None
    best = choose(trials)
    examined = (night.verdict or {}).get("forward")
    if "verify" in night.manifests and examined != (best.forward if best else None):
        problem = f"examined {str(examined)[:12]}, but the trials choose {best.forward[:12] if best else 'none'}"
        raise UserError(str(night.run.folder / "verify.json"), problem, "run verify again")
    return best.forward if best else None


def compute(run: Run) -> dict[str, Any]:
    """The one JSON object. A field whose stage did not run is None. UserError names a record that is missing or changed."""
    found = Found.read(run)
    night, score, approval = found.night, found.score, found.approval
    events = night_events(run, night)
    counts = Counter(event["event"] for event in events)
    served, incumbent = evidence.forwards(run, night.manifests.get("search"))
    if found.verdict and found.verdict["incumbent"] != incumbent:
        raise UserError(str(run.folder / "tuned.json"), "names another incumbent than the verdict", evidence.RESTORE)
    done = [trial for trial in found.trials if trial.done]
    return {
        "run": run.id,
        "endpoint": evidence.output(run, run.need("run"), "endpoint")["name"],
        "reason": night.started.get("reason"),
        "result": result(found),
        "service_starts": counts["service_start"],
        "weight_loads": weight_loads(run, night, events),
        "worker_starts": counts["worker_start"],
        "candidates": len({trial.forward for trial in done}),
        "outcomes": dict(sorted(Counter(str(trial.outcome) for trial in done).items())),
        "tiers": dict(sorted(Counter(trial.tier for trial in done).items())),
        "served": served,
        "incumbent": incumbent,
        "finalist": found.finalist,
        "search_objective": evidence.searched_for(run),
        "held_out_objective": found.verdict.get("objective", "output_tps") if found.verdict else None,
        "best_ratio": score.ratio if score else None,
        "ci_low": score.ci_low if score else None,
        "ci_high": score.ci_high if score else None,
        "held_out_pairs": score.pairs if score else None,
        "incumbent_tps": score.incumbent_tps if score else None,
        "finalist_tps": score.candidate_tps if score else None,
        "search_s": night.manifests["search"].seconds if "search" in night.manifests else None,
        "device_s": sum(trial.device_s for trial in done),
        "ladder_share": evidence.ladder_share(found.trials),
        "idle_s_while_queued": idle_while_queued(found.trials, events),
        "verified": found.verified,
        "failed_gates": failed_gates(found.verdict),
        "gates_s": sum(float(gate.get("seconds", 0.0)) for gate in found.verdict["gates"]) if found.verdict else None,
        "flags": evidence.flags(found.verdict),
        "approved_by": approval.signed.who if approval and approval.signed else None,
        "decision": str(approval.signed.decision) if approval and approval.signed else None,
        "shipped": found.shipped,
        **evidence.http(found.live),
        **evidence.beside_transformers(evidence.output(run, night.manifests.get("verify"), "baseline")),
        "wall_s": wall_s(night),
    }


def result(found: Found) -> str:
    """How the night ended, in a sentence."""
    manifests = found.night.manifests
    if "search" not in manifests:
        return "the night has not searched yet"
    if not found.finalist:
        return "no candidate ships: none was faster than the incumbent beyond doubt"
    if "verify" not in manifests or found.verdict is None:
        return "the finalist is not verified yet"
    if not found.verified:
        missing = evidence.missing_gates(found.verdict)
        silent = not failed_gates(found.verdict) and not found.verdict.get("unverified")
        return f"no candidate ships: {f'gates not run: {missing}' if missing and silent else why_failed(found.verdict)}"
    if "release" in manifests and "record" not in manifests["release"].outputs:
        return f"no candidate ships: {found.night.extra('release').get('problem') or 'no release was made'}"
    if found.approval is None:
        return "waits for approval"
    return _decided(found, found.approval)


def _decided(found: Found, approval: evidence.Approval) -> str:
    if approval.signed is None:
        return "no candidate ships: no trusted approver's signature stands behind the decision"
    if approval.release is None:
        return f"no candidate ships: {approval.said.get('why') or 'rejected'}"
    if found.shipped:
        return f"shipped {found.shipped}"
    problem = (found.live or found.night.extra("ship")).get("problem")
    return f"no candidate ships: {problem or 'not shipped yet'}"


def night_events(run: Run, night: Night) -> list[dict[str, Any]]:
    """Events of this night's engine while it searched. Workers that verification started later are not the search's."""
    searched = "search" in night.manifests
    if searched and not (run.folder / FILE).is_file():
        raise UserError(str(run.folder / FILE), "is missing, though the night has searched", evidence.RESTORE)
    end = night.manifests["search"].finished if searched else float("inf")
    return [event for event in read_events(run.folder) if float(event["time"]) <= end]


def weight_loads(run: Run, night: Night, events: Sequence[Mapping[str, Any]]) -> int | None:
    """How often the weights that this night worked on were read: the load that its first worker mapped, and each since.

    The keeper outlives nights and logs to the state folder. Without an event of a load before the first worker nobody
    can say: None, also when the night started no worker.
    """
    workers = [float(event["time"]) for event in events if event["event"] == "worker_start"]
    end = night.manifests["search"].finished if "search" in night.manifests else float("inf")
    told = [float(event["time"]) for event in read_events(run.folder.parent.parent) if event["event"] == "weight_load"]
    mapped = [time for time in told if time <= min(workers, default=float("-inf"))]
    if not mapped:
        return None
    begin = night.manifests["run"].started
    return sum(time <= end for time in told if time >= min(begin, mapped[-1]))


def idle_while_queued(trials: Sequence[Trial], events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which at least one submitted trial was unfinished and no trial was being evaluated."""
    waiting = merged([(trial.submitted_at, trial.finished_at) for trial in trials if trial.finished_at is not None])
    busy = merged(busy_spans(events))
    return round(sum(end - start for start, end in waiting) - overlap(waiting, busy), 3)


def busy_spans(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Of each trial from trial_start to its end; a start that nothing ends (the service was killed) counts to its next start."""
    spans: list[tuple[float, float]] = []
    opened: dict[str, float] = {}
    for event in events:
        kind, time, trial = event["event"], float(event["time"]), str(event.get("trial", ""))
        if kind == "trial_start":
            opened[trial] = time
        elif kind in ("trial_end", "trial_again", "trial_put_back") and trial in opened:
            spans.append((opened.pop(trial), time))
        elif kind == "service_start":
            spans += [(begin, time) for begin in opened.values()]
            opened.clear()
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
    started = night.manifests["run"].started
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
