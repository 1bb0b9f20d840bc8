"""What a person has to look at before approving. No gate decides on these."""

from __future__ import annotations

from tideforge.engine.forward import Forward
from tideforge.engine.screen import findings
from tideforge.tasks.verify.verdict import Verdict

TOO_GOOD = 2.0  # times the incumbent


def flags_of(verdict: Verdict, candidate: Forward) -> tuple[str, ...]:
    flags = [f"{gate.name} not verified: {gate.unverified}" for gate in verdict.gates if gate.unverified]
    flags += [f"{gate.name} is blind to {gate.figures['blind']}" for gate in verdict.gates if gate.figures.get("blind")]
    flags += [f"{gate.name}: {gate.figures['flag']}" for gate in verdict.gates if gate.figures.get("flag")]
    if verdict.ratio > TOO_GOOD:
        flags.append(f"{verdict.ratio:.2f} times the incumbent: find out why before you believe it")
    return (*flags, *(f"source: {found}" for found in findings(candidate)))
