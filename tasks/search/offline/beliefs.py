"""What the measurements so far say of each rewrite: Bayesian linear regression of log ratios on which rewrites are in.

A candidate is a set of rewrites. log(ratio) is modelled as the sum of its rewrites' effects plus noise whose size comes
from the trial's own interval. Proposals follow Thompson sampling (Russo et al., A Tutorial on Thompson Sampling, 2018):
draw effects from the posterior, take every rewrite whose draw is positive. Large sets come first, since a rewrite is
believed to help a little until measured; ablations follow by themselves where the posterior is wide.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

import numpy as np

PRIOR_MEAN = 0.03  # log ratio; slightly hopeful, so that untried rewrites are tried
PRIOR_SD = 0.06
LEAST_NOISE = 0.01

Recipe = frozenset[str]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A passed candidate: log of its ratio to the incumbent and the standard error of that."""

    recipe: Recipe
    log_ratio: float
    noise: float

    @classmethod
    def of(cls, recipe: Recipe, ratio: float, ci_low: float, ci_high: float) -> Measured:
        half = (ci_high - ci_low) / 2 / max(ratio, 1e-9)
        noise = half / 1.96 if math.isfinite(half) else 1.0
        return cls(recipe, math.log(max(ratio, 1e-9)), max(LEAST_NOISE, noise))


class Beliefs:
    """`groups` maps a rewrite to its exclusive group: at most one of a group is in a recipe."""

    def __init__(self, rewrites: Sequence[str], groups: Mapping[str, str]) -> None:
        self.rewrites, self.groups = tuple(rewrites), dict(groups)
        self.measured: list[Measured] = []
        self.failed: list[Recipe] = []

    def passed(self, result: Measured) -> None:
        self.measured.append(result)

    def failure(self, recipe: Recipe) -> None:
        self.failed.append(recipe)

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean [R] and covariance [R, R] of the effects (Bishop, Pattern Recognition, 3.50-3.51)."""
        precision = np.eye(len(self.rewrites)) / PRIOR_SD**2
        weighted = np.full(len(self.rewrites), PRIOR_MEAN) / PRIOR_SD**2
        for result in self.measured:
            row = np.array([name in result.recipe for name in self.rewrites], dtype=float)
            precision += np.outer(row, row) / result.noise**2
            weighted += row * result.log_ratio / result.noise**2
        covariance = np.linalg.inv(precision)
        return covariance @ weighted, covariance

    def effects(self) -> dict[str, float]:
        return dict(zip(self.rewrites, self.posterior()[0].tolist(), strict=True))

    def best(self) -> Recipe:
        """The recipe that the posterior means favour."""
        return self._choose(self.effects())

    def sample(self, rng: random.Random) -> Recipe:
        mean, covariance = self.posterior()
        root = np.linalg.cholesky(covariance + 1e-12 * np.eye(len(mean)))
        draw = mean + root @ np.array([rng.gauss(0, 1) for _ in mean])
        return self.repair(self._choose(dict(zip(self.rewrites, draw.tolist(), strict=True))), rng)

    def _choose(self, effects: Mapping[str, float]) -> Recipe:
        chosen: dict[str, str] = {}
        for name in self.rewrites:
            key = self.groups.get(name) or name
            if effects[name] > 0 and (key not in chosen or effects[name] > effects[chosen[key]]):
                chosen[key] = name
        return frozenset(chosen.values())

    def suspects(self, failed: Recipe) -> Recipe:
        """Which rewrites of a failed recipe may be to blame: those that no passed candidate held, or all."""
        cleared = frozenset().union(*(result.recipe for result in self.measured)) if self.measured else frozenset()
        return (failed - cleared) or failed

    def repair(self, recipe: Recipe, rng: random.Random) -> Recipe:
        """Drops half of the suspects of every failure that it would repeat: each trial halves the blame."""
        for failed in self.failed:
            suspects = sorted(self.suspects(failed) & recipe)
            if self.suspects(failed) <= recipe and suspects:
                recipe = recipe - frozenset(rng.sample(suspects, (len(suspects) + 1) // 2))
        return recipe
