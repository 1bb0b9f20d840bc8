"""One verification, start to end: every gate and the planned pairs, in random order in the same workers, then the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tideforge.data.workload import Workload
from tideforge.engine import measure
from tideforge.engine.compare import Bounds
from tideforge.engine.config import Settings
from tideforge.engine.evaluate import environment
from tideforge.engine.forward import Forward
from tideforge.engine.gates import asked
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.gates.probe import Probe
from tideforge.engine.objective import Objective
from tideforge.engine.service_config import PLAIN
from tideforge.errors import CandidateError, IncumbentLost
from tideforge.tasks import evidence
from tideforge.tasks.verify.flags import flags_of
from tideforge.tasks.verify.own import OWN
from tideforge.tasks.verify.plan import PAIR, Plan
from tideforge.tasks.verify.trialled import CHECKED_ANSWERS, Trialled
from tideforge.tasks.verify.verdict import GateResult, Verdict

Progress = Callable[[str], None]


def run_gate(name: str, probe: Probe) -> GateResult:
    """Of a gate of engine/gates."""
    return _result(name, lambda: asked(name, probe))


def run_own(name: str, trialled: Trialled) -> GateResult:
    """Of a gate of verification's own."""
    return _result(name, lambda: OWN[name](trialled))


def _result(name: str, gate: Callable[[], dict[str, Any]]) -> GateResult:
    """A candidate that fails outright under a gate has failed that gate."""
    begin = time.perf_counter()

    def result(passed: bool, evidence: str, figures: dict[str, Any], unverified: str = "") -> GateResult:
        return GateResult(name, passed, evidence, time.perf_counter() - begin, figures, unverified)

    try:
        return result(True, "", gate())
    except Unverifiable as reason:
        return result(True, "", {}, str(reason))
    except Caught as caught:
        return result(False, str(caught), {})
    except CandidateError as error:
        return result(False, f"{error.outcome}: {error.message}", {})


def examine(
    settings: Settings,
    events: Path,
    incumbent: Forward,
    candidate: Forward,
    workload: Workload,
    bounds: Bounds,
    plan: Plan,
    progress: Progress = lambda line: None,
    now: Callable[[], float] = time.perf_counter,
    noise: Sequence[float] = (),
    objective: Objective = PLAIN,
    floor: tuple[float | None, int] = (None, 0),
    protected: Sequence[Path] = (),
) -> Verdict:
    """All gates of the plan and its pairs, until the time is over: looked at before each, but for the gates that look back,
    which come last. Never raises for what the candidate did.

    `noise`: log ratios of the incumbent against itself, as the search found them; they widen the interval. `floor`: the
    device's bytes/s and its cache's bytes (possible.py). `protected`: files and folders that nobody may change meanwhile,
    besides this package's own.
    """
    made = Trialled(settings, events, incumbent, candidate, workload, bounds, objective, noise, protected)
    with contextlib.closing(made) as trialled:
        gates: list[GateResult] = []
        begin, cut, unverified = now(), "", ""
        try:
            trialled.warm()
            if _act(trialled, plan, gates, progress, lambda: now() - begin >= plan.seconds):
                for name in plan.looking_back():
                    gates.append(_told(run_own(name, trialled), progress))
            cut, unverified = plan.shortfall(len(trialled.blocks), [gate.name for gate in gates])
            gates += of_blocks(trialled, trialled.answers_s, trialled.floor_s(*floor))
        except IncumbentLost as lost:
            unverified = str(lost)
        except CandidateError as error:
            gates.append(GateResult("answers", False, f"{error.outcome}: {error.message}", now() - begin, {}))
        verdict = dataclasses.replace(_verdict(trialled, gates), cut=cut, unverified=unverified)
        return dataclasses.replace(verdict, flags=flags_of(verdict, candidate))


def _act(trialled: Trialled, plan: Plan, gates: list[GateResult], progress: Progress, over: Callable[[], bool]) -> bool:
    """Whether all that must be was done before the time was over."""
    actions = plan.actions()
    must = len(actions) - (plan.pairs - plan.least)
    for done, action in enumerate(actions):
        if over():
            return done >= must
        if action == PAIR:
            trialled.timed_pair()
            progress(f"held-out pair {len(trialled.blocks)} of {plan.pairs}")
        else:
            own = action in OWN
            gates.append(_told(run_own(action, trialled) if own else run_gate(action, trialled.probe()), progress))
        trialled.look()
    return True


def _told(gate: GateResult, progress: Progress) -> GateResult:
    said = "passed" if gate.passed else gate.evidence
    progress(f"gate {gate.name}: {f'not verified: {gate.unverified}' if gate.unverified else said}")
    return gate


def of_blocks(trialled: Trialled, seconds: float, floor_s: float) -> list[GateResult]:
    """What the timed blocks have shown, if there were any: they raised nothing, and no step was faster than the floor."""
    if not trialled.blocks:
        return []
    figures = {"answers": CHECKED_ANSWERS * len(trialled.blocks), "bound": trialled.bounds.logit_gap}
    fastest = min(step_s(block) for _, block in trialled.blocks)
    said = f"a step of {1e3 * fastest:.4g} ms is under the floor, {1e3 * floor_s:.4g} ms"
    possible = fastest >= floor_s
    times = {"step_ms": 1e3 * fastest, "floor_ms": 1e3 * floor_s}
    return [
        GateResult("answers", True, "", seconds, figures),
        GateResult("possible", possible, "" if possible else said, 0.0, times),
    ]


def step_s(block: measure.Block) -> float:
    """Most that a step of the block can have taken on average: each token of its longest answer took one."""
    return block.seconds / max(len(answer.tokens) for answer in block.answers)


def _verdict(trialled: Trialled, gates: list[GateResult]) -> Verdict:
    blocks, objective = trialled.blocks, trialled.objective
    scores = [(objective.worth(a), objective.worth(b)) for a, b in blocks]
    score = measure.Interval(0.0, 0.0, 0.0, len(blocks))
    if len(blocks) > 1:
        score = evidence.held_out(scores, trialled.noise)
    ours = [b for _, b in blocks]
    p50, p90 = measure.user_tps(ours) if ours else (0.0, 0.0)
    ttft = measure.percentile([answer.ttft_s for b in ours for answer in b.answers], 0.5) if ours else 0.0
    return Verdict(
        forward=trialled.candidate.id, incumbent=trialled.incumbent.id,
        gates=tuple(sorted(gates, key=lambda gate: gate.name)),
        pairs=tuple((a.output_tps, b.output_tps) for a, b in blocks),
        ratio=score.ratio, ci_low=score.low, ci_high=score.high,
        ttft_ms=1e3 * ttft, tps_per_user_p50=p50, tps_per_user_p90=p90,
        bound=trialled.bounds.logit_gap, weights_sha256=trialled.lab.weights_sha256,
        environment={**environment(), "sandbox": str(trialled.lab.sandbox)},
        objective=objective.maximize, scores=() if objective.maximize == "output_tps" else tuple(scores),
    )  # fmt: skip
