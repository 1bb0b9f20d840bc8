"""Is a night worth its cost? Pure arithmetic on drift that was seen, what nights gained and what a night takes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stakes:
    """`gain` is relative (0.1: a tenth more); hours are those of the endpoint's devices."""

    gain: float
    source: str  # what the gain is told by
    horizon_hours: float  # that a gain is counted for
    cost_hours: float  # of one night, at most

    @property
    def worth_hours(self) -> float:
        """Device hours that the same work takes less within the horizon."""
        return self.horizon_hours * self.gain / (1 + self.gain) if self.gain > 0 else 0.0

    @property
    def pays(self) -> bool:
        return self.worth_hours > self.cost_hours


def refusal(drifted: bool, stakes: Stakes, hours_since: float | None, cooldown_hours: float) -> str:
    """Why no night starts; empty when one does. `hours_since` the last that drift started, None if there was none."""
    if not drifted:
        return "no drift"
    if hours_since is not None and hours_since < cooldown_hours:
        return f"cooling down: the last was {hours_since:.1f} h ago, {cooldown_hours:g} h must pass"
    if not stakes.pays:
        return (
            f"not worth it: a gain of {stakes.gain:.1%} ({stakes.source}) saves {stakes.worth_hours:.2f} device hours "
            f"in {stakes.horizon_hours:g} h, a night takes {stakes.cost_hours:.2f}"
        )
    return ""
