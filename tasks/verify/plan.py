"""What a verification does, in which order and within which time."""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Iterable, Sequence

from tideforge.tasks.endpoint import Budget

# Gates of verification alone (tasks/verify/own.py), beside those of engine/gates.
DURING = ("other_weights", "sentinel")
# They look back: the first at all that the candidate's worker came to hold, and the second ends it.
AFTER = ("packing", "incumbent_unharmed", "provenance")
OF_BLOCKS = ("answers", "possible")  # found while blocks were timed
PAIR = ""


def required() -> frozenset[str]:
    """Names of all gates that a verdict must hold."""
    from tideforge.engine.gates import GATES

    return frozenset((*GATES, *DURING, *AFTER, *OF_BLOCKS))


def choosable() -> tuple[str, ...]:
    """Names of gates that can be asked alone."""
    from tideforge.engine.gates import GATES

    return (*GATES, *DURING, *AFTER)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a verification does within `seconds`: gates, all if None, and pairs of timed blocks, of which `least` must be."""

    pairs: int
    least: int
    seconds: float
    gates: tuple[str, ...] | None = None

    @classmethod
    def of(cls, budget: Budget) -> Plan:
        return cls(budget.held_out_pairs, min(budget.least_held_out_pairs, budget.held_out_pairs), budget.verify_s)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the gates, those that look back last."""
        chosen = choosable() if self.gates is None else self.gates
        return (*(name for name in chosen if name not in AFTER), *(name for name in AFTER if name in chosen))

    def actions(self) -> list[str]:
        """Names of gates, PAIR for a pair. What must be comes first, in random order, so that time runs out on the rest."""
        needed = [*(name for name in self.names if name not in AFTER), *[PAIR] * self.least]
        random.Random(secrets.randbits(64)).shuffle(needed)
        return [*needed, *[PAIR] * (self.pairs - self.least)]

    def looking_back(self) -> list[str]:
        return [name for name in self.names if name in AFTER]

    def shortfall(self, pairs: int, ran: Iterable[str]) -> tuple[str, str]:
        """(cut, unverified): what is to say of a verification that ended after so many pairs and these gates."""
        missing = sorted(set(self.names) - set(ran))
        said = f"{pairs} of {self.pairs} held-out pairs in {self.seconds:g} s"
        if missing or pairs < self.least:
            without = f", and {len(missing)} of {len(self.names)} gates not run" if missing else ""
            return "", f"out of time: {said}, at least {self.least} are asked for{without}"
        return (f"out of time, but with pairs enough: {said}" if pairs < self.pairs else ""), ""


def unknown(gates: Sequence[str]) -> list[str]:
    return [name for name in gates if name not in choosable()]
