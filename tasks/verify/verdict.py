"""What verification says of one forward. Plain records: no torch, and no opinion of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

from tideforge.tasks.verify.plan import required


@dataclasses.dataclass(frozen=True)
class GateResult:
    """`unverified`: why the gate could not be asked here, which is no fault of the candidate's; a person has to know."""

    name: str
    passed: bool
    evidence: str
    seconds: float
    figures: dict[str, Any]
    unverified: str = ""


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
    flags: tuple[str, ...] = ()  # what a person has to look at: no gate decides on these

    @property
    def passed(self) -> bool:
        """All gates passed, all of them ran, on pairs enough, and the gain's lower bound is above 1."""
        return self.clean and {gate.name for gate in self.gates} >= required() and self.ci_low > 1

    @property
    def clean(self) -> bool:
        """Nothing that was looked at is wrong, and all that was asked for was looked at."""
        return not self.unverified and all(gate.passed for gate in self.gates)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


def reason(verdict: Verdict) -> str:
    """One line: why it may ship or why not."""
    failed = [f"{gate.name}: {gate.evidence}" for gate in verdict.gates if not gate.passed]
    interval = f"{verdict.ratio:.3f} [{verdict.ci_low:.3f}, {verdict.ci_high:.3f}]"
    if failed:
        return "failed " + "; ".join(failed)
    if verdict.unverified:
        return f"not verified: {verdict.unverified}"
    if verdict.ci_low <= 1:
        return f"the gain on held-out requests is not beyond doubt: {interval}"
    cut = f" ({verdict.cut})" if verdict.cut else ""
    return f"all gates passed, {interval} on {len(verdict.pairs)} held-out pairs{cut}"
