"""The node: one finalist, chosen on the search part, against held-out requests in freshly started workers.

Gates and timed blocks run in random order in the same workers, but for the pairs beyond those that must be, which come
last. A candidate can still tell them apart by their batch sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import check, measure
from tideforge.engine import load as loads
from tideforge.engine.compare import Bounds
from tideforge.engine.config import Settings
from tideforge.engine.evaluate import INCUMBENT_RETRIES, environment
from tideforge.engine.events import log_event
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import Forward
from tideforge.engine.gates import GATES
from tideforge.engine.gates.caught import Caught
from tideforge.engine.gates.probe import POISON, Probe
from tideforge.engine.lab import Lab
from tideforge.engine.objective import Objective
from tideforge.engine.reference import Reference
from tideforge.engine.service_config import PLAIN, for_trials, new_core
from tideforge.errors import CandidateError, IncumbentLost, UserError
from tideforge.tasks import evidence
from tideforge.tasks.endpoint import Budget, Endpoint
from tideforge.tasks.machine import settings_for
from tideforge.tasks.objective import measured
from tideforge.tasks.store import Manifest, Run
from tideforge.tasks.verify.plainness import beside_transformers

Replay = Callable[[str, RemoteExecutor], measure.Block]  # of a forward on its worker
STEP_TIMEOUT_S = 60.0
CHECKED_ANSWERS = 2  # of every timed block, besides the gates


@dataclasses.dataclass(frozen=True)
class GateResult:
    name: str
    passed: bool
    evidence: str
    seconds: float
    figures: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What verification says of one forward. `pairs` are output tokens/s of incumbent and candidate on held-out requests.

    `ratio` is of `scores`, pairs of the objective's figure (engine/objective.py: more is better); () where `pairs` are that.
    """

    forward: str
    incumbent: str
    gates: tuple[GateResult, ...]
    pairs: tuple[tuple[float, float], ...]
    ratio: float
    ci_low: float
    ci_high: float
    ttft_ms: float
    tps_per_user_p50: float
    tps_per_user_p90: float
    bound: float
    weights_sha256: str
    environment: dict[str, Any]
    cut: str = ""  # what was left out when the time was over, and the verdict stands without
    unverified: str = ""  # why there is no verdict, for reasons that are not the candidate's
    objective: str = "output_tps"
    scores: tuple[tuple[float, float], ...] = ()

    @property
    def passed(self) -> bool:
        """All gates passed, all of them ran, on pairs enough, and the gain's lower bound is above 1."""
        return (
            not self.unverified
            and all(gate.passed for gate in self.gates)
            and {gate.name for gate in self.gates} >= set(GATES)
            and self.ci_low > 1
        )

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a verification does within `seconds`: every gate, and pairs of timed blocks, of which `least` must be."""

    pairs: int
    least: int
    seconds: float

    @classmethod
    def of(cls, budget: Budget) -> Plan:
        return cls(budget.held_out_pairs, min(budget.least_held_out_pairs, budget.held_out_pairs), budget.verify_s)

    def actions(self) -> list[str]:
        """Names of gates, "" for a pair. What must be comes first, in random order, so that time runs out on the rest."""
        needed = [*GATES, *[""] * self.least]
        random.Random(secrets.randbits(64)).shuffle(needed)
        return [*needed, *[""] * (self.pairs - self.least)]

    def shortfall(self, pairs: int, gates: Sequence[GateResult]) -> tuple[str, str]:
        """(cut, unverified): what is to say of a verification that ended after so many pairs and these gates."""
        missing = sorted(set(GATES) - {gate.name for gate in gates})
        said = f"{pairs} of {self.pairs} held-out pairs in {self.seconds:g} s"
        if missing or pairs < self.least:
            without = f", and {len(missing)} of {len(GATES)} gates not run" if missing else ""
            return "", f"out of time: {said}, at least {self.least} are asked for{without}"
        return (f"out of time, but with pairs enough: {said}" if pairs < self.pairs else ""), ""


class Trialled:
    """Both workers of one verification, side by side, until closed."""

    def __init__(
        self,
        settings: Settings,
        events: Any,
        incumbent: Forward,
        candidate: Forward,
        workload: Workload,
        bounds: Bounds,
        objective: Objective = PLAIN,
    ) -> None:
        settings = for_trials(settings, workload, objective)
        self.lab = Lab(settings, events)
        self.incumbent, self.candidate, self.workload, self.bounds = incumbent, candidate, workload, bounds
        self.objective = objective
        self.corpus = workload.corpus[len(workload.corpus) // 2 :]
        self.layers = range(self.lab.config.num_hidden_layers)
        self.settings = settings.with_knobs(incumbent.knobs)
        self.reference = Reference.start(settings.model, settings.state, device=settings.device)
        self.arena = self.lab.arena("verify-candidate")
        self.arena.fill(POISON)
        self.a = self._worker(incumbent, self.lab.arena("verify-incumbent"))
        self.b = self._worker(candidate, self.arena)
        self.blocks: list[tuple[measure.Block, measure.Block]] = []

    def _worker(self, forward: Forward, arena: Any) -> RemoteExecutor:
        worker = self.lab.spawn(forward, arena)
        worker.step_timeout_s = STEP_TIMEOUT_S
        self.lab.capture(worker)
        return worker

    def close(self) -> None:
        self.reference.close()
        self.lab.close()

    def probe(self) -> Probe:
        return Probe(
            self.candidate.id, self.b, self.arena, self.reference, self.settings.limits, self.layers, self.bounds, self.corpus,
            lambda: secrets.randbits(63),
        )  # fmt: skip

    def warm(self) -> None:
        """One short replay on each side: the first pass of a process packs, allocates and faults pages in."""
        self._both(self._short)

    @property
    def _short(self) -> list[RequestShape]:
        return [dataclasses.replace(shape, output_tokens=2, turns=()) for shape in self.workload.held_out]

    def timed_pair(self) -> None:
        pair = self._both(self.workload.held_out, turned=len(self.blocks) % 2 == 1)
        self.blocks.append(pair)
        answers = secrets.SystemRandom().sample(pair[1].answers, min(CHECKED_ANSWERS, len(pair[1].answers)))
        check.require_right(self.reference, answers, self.layers, self.bounds.logit_gap)

    def _both(self, part: Sequence[RequestShape], turned: bool = False) -> tuple[measure.Block, measure.Block]:
        """A pair of blocks; again when the incumbent's worker died under it, for which the candidate is not to blame."""
        for _ in range(INCUMBENT_RETRIES + 1):
            try:
                if not self.a.alive:
                    self.lab.release(self.a)
                    self.a = self._worker(self.incumbent, self.lab.arena("verify-incumbent"))
                    self._pair(self._short)
                with self.lab.clock():
                    return self._pair(part, turned)
            except CandidateError as error:
                if self.a.alive or not self.b.alive:
                    raise
                log_event(self.lab.events, "incumbent_died", worker=self.a.pid, message=error.message)
        raise IncumbentLost(f"the incumbent's worker died {INCUMBENT_RETRIES + 1} times")

    def _pair(self, part: Sequence[RequestShape], turned: bool = False) -> tuple[measure.Block, measure.Block]:
        replay = (self._load if self.objective.by_loads(part) else self._requests)(part)
        sides = [(self.incumbent.id, self.a), (self.candidate.id, self.b)]
        order = reversed(sides) if turned else sides
        blocks = {worker.pid: replay(forward, worker) for forward, worker in order}
        return blocks[self.a.pid], blocks[self.b.pid]

    def _requests(self, part: Sequence[RequestShape]) -> Replay:
        """Fresh requests, one a user, all at once."""
        shapes, prompts = measure.draw_replay(part, self.workload.users, self.corpus, secrets.randbits(64))

        def replay(forward: str, worker: RemoteExecutor) -> measure.Block:
            side = measure.Side.of(forward, new_core(self.settings), worker)
            return measure.run_block(side.core, forward, shapes, prompts, self.workload.users)

        return replay

    def _load(self, part: Sequence[RequestShape]) -> Replay:
        """A fresh load of the objective's."""
        longest = min(self.settings.limits.max_model_len, len(self.corpus) - 1)
        load = self.objective.load_of(part, self.workload.users, longest, random.Random(secrets.randbits(64)))
        script = loads.draw_script(load, self.corpus, secrets.randbits(64))

        def replay(forward: str, worker: RemoteExecutor) -> measure.Block:
            side = measure.Side.of(forward, loads.core_for(self.settings, load), worker)
            return loads.run_load(side, load, script).block

        return replay


def run_gate(name: str, probe: Probe) -> GateResult:
    """A gate's result; a candidate that fails outright under a gate has failed that gate."""
    begin = time.perf_counter()
    try:
        figures, evidence, passed = GATES[name](probe), "", True
    except Caught as caught:
        figures, evidence, passed = {}, str(caught), False
    except CandidateError as error:
        figures, evidence, passed = {}, f"{error.outcome}: {error.message}", False
    return GateResult(name, passed, evidence, time.perf_counter() - begin, figures)


def examine(
    settings: Settings,
    events: Any,
    incumbent: Forward,
    candidate: Forward,
    workload: Workload,
    bounds: Bounds,
    plan: Plan,
    progress: Callable[[str], None] = lambda line: None,
    now: Callable[[], float] = time.perf_counter,
    noise: Sequence[float] = (),
    objective: Objective = PLAIN,
) -> Verdict:
    """All gates and the planned pairs, until the time is over: looked at before each. Never raises for what the candidate did.

    `noise`: log ratios of the incumbent against itself, as the search found them; they widen the interval.
    """
    with contextlib.closing(Trialled(settings, events, incumbent, candidate, workload, bounds, objective)) as trialled:
        gates: list[GateResult] = []
        begin, cut, unverified = now(), "", ""
        try:
            trialled.warm()
            for action in plan.actions():
                if now() - begin >= plan.seconds:
                    break
                if action:
                    gates.append(run_gate(action, trialled.probe()))
                    progress(f"gate {action}: {'passed' if gates[-1].passed else gates[-1].evidence}")
                else:
                    trialled.timed_pair()
                    progress(f"held-out pair {len(trialled.blocks)} of {plan.pairs}")
            cut, unverified = plan.shortfall(len(trialled.blocks), gates)
            figures = {"answers": CHECKED_ANSWERS * len(trialled.blocks), "bound": bounds.logit_gap}
            if trialled.blocks:
                gates.append(GateResult("answers", True, "", now() - begin, figures))
        except IncumbentLost as lost:
            unverified = str(lost)
        except CandidateError as error:
            gates.append(GateResult("answers", False, f"{error.outcome}: {error.message}", now() - begin, {}))
        return dataclasses.replace(_verdict(trialled, gates, noise), cut=cut, unverified=unverified)


def _verdict(trialled: Trialled, gates: list[GateResult], noise: Sequence[float]) -> Verdict:
    blocks, objective = trialled.blocks, trialled.objective
    scores = [(objective.worth(a), objective.worth(b)) for a, b in blocks]
    score = measure.Interval(0.0, 0.0, 0.0, len(blocks))
    if len(blocks) > 1:
        score = evidence.held_out(scores, noise)
    ours = [b for _, b in blocks]
    p50, p90 = measure.user_tps(ours) if ours else (0.0, 0.0)
    ttft = measure.percentile([answer.ttft_s for b in ours for answer in b.answers], 0.5) if ours else 0.0
    return Verdict(
        forward=trialled.candidate.id, incumbent=trialled.incumbent.id,
        gates=tuple(sorted(gates, key=lambda gate: gate.name)),
        pairs=tuple((a.output_tps, b.output_tps) for a, b in blocks),
        ratio=score.ratio, ci_low=score.low, ci_high=score.high,
        ttft_ms=1e3 * ttft, tps_per_user_p50=p50, tps_per_user_p90=p90,
        bound=trialled.bounds.logit_gap, weights_sha256=trialled.lab.weights_sha256, environment=environment(),
        objective=objective.maximize, scores=() if objective.maximize == "output_tps" else tuple(scores),
    )  # fmt: skip


def verify(run: Run, endpoint: Endpoint) -> Manifest:
    """verify.json: the verdict on the search's finalist, or that there is none."""
    search, plan = run.need("search"), Plan.of(endpoint.budget)
    inputs = {
        "finalist": str(search.extra["finalist"]),
        "incumbent": str(search.extra["incumbent"]),
        "workload": run.need("workload").outputs["workload"].sha256,
        "plan": f"{plan.pairs} pairs, at least {plan.least}, in {plan.seconds:g} s",
        "objective": repr(measured(endpoint)),
    }
    if (done := run.done("verify", inputs)) is not None:
        return done
    started = time.time()
    if search.extra["finalist"] is None:
        extra = {"passed": False, "reason": "no candidate was faster than the incumbent beyond doubt", "forward": None}
        return run.finish("verify", inputs, {}, extra, started=started)
    forwards = endpoint.state / "forwards"
    candidate = Forward.load(forwards / inputs["finalist"])
    if candidate.id != inputs["finalist"]:
        raise UserError(str(forwards / inputs["finalist"]), "its files do not hash to its name", "run the search again")
    settings = settings_for(endpoint)
    verdict = examine(
        settings, run.folder, Forward.load(forwards / inputs["incumbent"]), candidate,
        Workload.read(run.path(run.need("workload"), "workload")), bounds_from(search.extra["bounds"]),
        plan, lambda line: log_event(run.folder, "verify", line=line), noise=search.extra["noise"],
        objective=measured(endpoint),
    )  # fmt: skip
    log_event(run.folder, "verify", line="the incumbent's one-user decode beside transformers")
    plain = beside_transformers(settings, (forwards / str(search.extra["served"])).resolve())
    outputs = {"verdict": run.write_json("verdict", verdict.to_dict()), "baseline": run.write_json("baseline", plain)}
    extra = {
        "passed": verdict.passed, "forward": verdict.forward, "reason": reason(verdict),
        "incumbent_vs_transformers": plain.get("ratio"),
        "linear_floor_ms": 1e3 / plain["floor_tps"] if "floor_tps" in plain else None,
        "incumbent_decode_ms": 1e3 / plain["raw_tps"] if "raw_tps" in plain else None,
    }  # fmt: skip
    return run.finish("verify", inputs, outputs, extra, started=started)


def bounds_from(raw: Mapping[str, Any]) -> Bounds:
    """Bounds as the search derived and stored them."""
    return Bounds(**{**raw, "key": tuple(raw["key"]), "value": tuple(raw["value"])})


def reason(verdict: Verdict) -> str:
    """One line: why it may ship or why not."""
    failed = [f"{gate.name}: {gate.evidence}" for gate in verdict.gates if not gate.passed]
    if failed:
        return "failed " + "; ".join(failed)
    if verdict.unverified:
        return f"not verified: {verdict.unverified}"
    if verdict.ci_low <= 1:
        return f"the gain on held-out requests is not beyond doubt: {verdict.ratio:.3f} [{verdict.ci_low:.3f}, {verdict.ci_high:.3f}]"
    return (
        f"all gates passed, {verdict.ratio:.3f} [{verdict.ci_low:.3f}, {verdict.ci_high:.3f}] on {len(verdict.pairs)} held-out pairs"
        + (f" ({verdict.cut})" if verdict.cut else "")
    )
