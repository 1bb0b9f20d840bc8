"""How two profiles differ: which figures moved, and how far apart their distributions are. Says nothing of significance:
that is drift.py's question."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tideforge.data.drift import coarse
from tideforge.data.profile_records import NO_TOKENS, Cells, Profile

Counts = Mapping[int, int]
NO_FIGURES = ("version", "bins_per_octave", "joint", "joint_cached", "first_arrival", "quantile_error")


@dataclasses.dataclass(frozen=True)
class Moved:
    """A figure on both sides; None where a profile does not have it."""

    name: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """Relative to before; None where that says nothing."""
        return self.after / self.before - 1 if self.before and self.after is not None else None


@dataclasses.dataclass(frozen=True)
class Difference:
    before: str
    after: str
    moved: tuple[Moved, ...]  # largest relative change first, those that only one side has before them
    ks: dict[str, float]  # of each marginal that both sides have, 0 to 1
    joint: float  # total variation of the joint histogram of prompt and output in bins of an octave, 0 to 1

    def to_dict(self) -> dict[str, Any]:
        moved = [{**dataclasses.asdict(each), "change": each.change} for each in self.moved]
        return {**dataclasses.asdict(self), "moved": moved}


def difference(before: Profile, after: Profile, least: float = 0.01) -> Difference:
    """Figures that moved by less than `least` (relative) are left out."""
    one, two = dict(figures(before.model_dump())), dict(figures(after.model_dump()))
    both = [Moved(name, one.get(name), two.get(name)) for name in dict.fromkeys([*one, *two])]
    moved = [each for each in both if each.before != each.after and far(each, least)]
    moved.sort(key=lambda each: -abs(each.change) if each.change is not None else float("-inf"))
    ours, theirs = marginals(before), marginals(after)
    return Difference(
        before=before.sha256, after=after.sha256, moved=tuple(moved),
        ks={name: ks(counts, theirs[name]) for name, counts in ours.items() if name in theirs},
        joint=total_variation(before.joint, after.joint),
    )  # fmt: skip


def far(each: Moved, least: float) -> bool:
    return each.change is None or abs(each.change) >= least


def figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a dumped profile under its dotted name, histograms left out."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key not in NO_FIGURES:
                yield from figures(below, f"{name}.{key}" if name else key)
    elif isinstance(value, int | float):
        yield name, value


def marginals(profile: Profile) -> dict[str, Counts]:
    """Bin -> requests, by what is binned."""
    found: dict[str, dict[int, int]] = {"prompt": {}, "output": {}, "hour": {}}
    for prompt, output, requests in profile.joint:
        add(found["prompt"], prompt, requests)
        add(found["output"], output, requests)
    for *_, cached, requests in profile.joint_cached:
        if cached >= NO_TOKENS:
            add(found.setdefault("cached", {}), cached, requests)
    for hour, group in profile.hours.items():
        add(found["hour"], int(hour), group.requests)
    return {name: counts for name, counts in found.items() if counts}


def add(counts: dict[int, int], key: int, number: int) -> None:
    counts[key] = counts.get(key, 0) + number


def ks(one: Counts, two: Counts) -> float:
    """Kolmogorov-Smirnov distance at the edges of bins."""
    ours, theirs, worst, passed = sum(one.values()), sum(two.values()), 0.0, (0, 0)
    for key in sorted(one.keys() | two.keys()):
        passed = (passed[0] + one.get(key, 0), passed[1] + two.get(key, 0))
        worst = max(worst, abs(passed[0] / ours - passed[1] / theirs))
    return worst


def total_variation(one: Cells, two: Cells) -> float:
    """Half the sum of the differences of the shares, over bins of an octave: sampling alone moves finer ones."""
    ours, theirs = coarse(one), coarse(two)
    whole = sum(ours.values()), sum(theirs.values())
    cells = sorted(ours.keys() | theirs.keys())
    return sum(abs(ours.get(cell, 0) / whole[0] - theirs.get(cell, 0) / whole[1]) for cell in cells) / 2
