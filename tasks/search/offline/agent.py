"""The offline agent: keeps the engine's queue fed with recipes of rewrites and learns from every figure that comes back."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tideforge.engine.forward import Forward
from tideforge.engine.outcome import SLOW, UNJUDGED, Trial
from tideforge.errors import ProtocolError, UserError
from tideforge.tasks.search.agent import Allowance, Cost, Done, Engine, EngineGone, Stop
from tideforge.tasks.search.board import Board
from tideforge.tasks.search.offline.beliefs import Beliefs, Measured, Recipe
from tideforge.tasks.search.offline.recipes import Rule, cook, fitting

IN_FLIGHT = 2  # waiting trials an agent keeps, so that the engine never idles and a proposal is not long out of date
ATTEMPTS = 60  # draws for a recipe that was not tried yet, before the agent is done
POLL_S = 1.0


class OfflineAgent:
    """`rules` know Python, torch and the contract; nothing here knows the incumbent."""

    def __init__(
        self, name: str, seed: int, engine: Engine, board: Board, allowance: Allowance, rules: Sequence[Rule],
        tier: str = SLOW, weights_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.engine, self.board, self.allowance = name, engine, board, allowance
        self.weights_bytes = weights_bytes
        self.tier = tier
        self.rng = random.Random(f"{seed}/{name}")
        self.rules: Sequence[Rule] = rules
        self.cost = Cost()
        self.base: Forward
        self.beliefs: Beliefs
        self.own: dict[str, Recipe] = {}  # trial id -> recipe, while it waits or runs
        self.learned: set[str] = set()  # trial ids
        self.tried: set[str] = set()  # forward ids
        self.cooked: set[Recipe] = set()
        self.best = 1.0

    def run(self) -> Stop:
        try:
            self.start()
            while True:
                self.step()
        except Stop as stop:
            return stop
        except (UserError, ProtocolError) as error:
            return EngineGone(str(error))

    def start(self) -> None:
        self.allowance.check_time()
        self.base = self.engine.incumbent()
        self.rules = fitting(self.rules, self.base)
        if not self.rules:
            raise Done("no rule fires on the incumbent")
        self.beliefs = Beliefs([rule.name for rule in self.rules], {rule.name: rule.group for rule in self.rules})
        self.tried.add(self.base.id)
        self.board.post(self.name, "note", f"{len(self.rules)} rewrites fit: {', '.join(r.name for r in self.rules)}")

    def step(self) -> None:
        self.allowance.check_time()
        self.learn()
        while len(self.own) < IN_FLIGHT and self.propose():
            pass
        if not self.own:
            raise Done("every recipe that the measurements favour was tried")
        self.engine.wait(next(iter(self.own)), min(POLL_S, self.allowance.remaining_s))

    def learn(self) -> None:
        """Takes in finished trials, of other agents too where the board tells what they were made of.

        Figures of another tier are of something else; what fails there is wrong all the same.
        """
        recipes = {post.trial: frozenset(post.rewrites) for post in self.board.posts() if post.trial and post.rewrites}
        for trial in self.engine.trials():
            self.tried.add(trial.forward)
            recipe = self.own.get(trial.id) or recipes.get(trial.id)
            other = trial.tier != self.tier and trial.figures is not None
            if trial.done and recipe and trial.id not in self.learned and not other:
                self.learned.add(trial.id)
                self.take_in(trial, recipe)

    def take_in(self, trial: Trial, recipe: Recipe) -> None:
        figures = trial.figures
        if figures is not None:
            self.beliefs.passed(Measured.of(recipe, figures.ratio, figures.ci_low, figures.ci_high))
        elif trial.outcome not in UNJUDGED:
            self.beliefs.failure(recipe)
        if self.own.pop(trial.id, None) is not None:
            self.board.post(self.name, "result", told(trial, self.best), trial.id, tuple(sorted(recipe)))
        if figures is not None and figures.ci_low > self.best:
            self.best = figures.ci_low

    def propose(self) -> bool:
        """Submits one recipe that nobody tried yet; False when none was found."""
        for attempt in range(ATTEMPTS):
            recipe = self.beliefs.best() if attempt == 0 and self.beliefs.measured else self.draw(attempt)
            recipe = self.beliefs.repair(recipe, self.rng)
            if recipe in self.cooked:
                continue
            self.cooked.add(recipe)
            forward, fired = cook(self.rules, self.base, recipe, self.weights_bytes)
            if fired and forward.id not in self.tried:
                self.submit(forward, fired)
                return True
        return False

    def draw(self, attempt: int) -> Recipe:
        """A posterior draw; late attempts, when those repeat themselves, change one rewrite of the best."""
        if attempt < ATTEMPTS // 2:
            return self.beliefs.sample(self.rng)
        return self.beliefs.best() ^ {self.rng.choice(self.beliefs.rewrites)}

    def submit(self, forward: Forward, fired: Recipe) -> None:
        trial = self.engine.submit(forward, self.tier, self.name)
        self.tried.add(forward.id)
        self.own[trial] = fired
        self.board.post(self.name, "hypothesis", self.reason(fired), trial, tuple(sorted(fired)))

    def reason(self, fired: Recipe) -> str:
        effects = self.beliefs.effects()
        parts = [f"{r.name} ({effects[r.name]:+.3f}): {r.hypothesis}" for r in self.rules if r.name in fired]
        return "; ".join(parts)[:2000]


def told(trial: Trial, best: float) -> str:
    if trial.figures is None:
        return f"{trial.outcome}: {trial.message}"[:1000]
    figures = trial.figures
    verdict = "a new best" if figures.ci_low > best else "no new best"
    return (
        f"ratio {figures.ratio:.3f} [{figures.ci_low:.3f}, {figures.ci_high:.3f}] on the {trial.tier} tier, {verdict}"
    )
