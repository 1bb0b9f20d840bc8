"""From the fast tier to the slow one: which candidates go on, and who sends them.

The slow tier's time is dear and its figures are the only ones that count. While agents search, one in TWENTY of the judged fast
trials is sent on, less one place that is kept for the end; then the best of all go, FEW of them where there were few trials.
Each forward goes on once. One that surely gains nothing never does.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tideforge.engine.client import EngineClient
from tideforge.engine.events import log_event
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import FAST, SLOW, UNJUDGED, Trial
from tideforge.errors import CandidateError, ProtocolError, UserError
from tideforge.tasks.search.board import Board

TWENTY = 20
FEW = 3
NAME = "promotion"  # on the board
POLL_S = 1.0


def hopeful(trial: Trial) -> bool:
    """A fast trial that passed and may be a gain."""
    return trial.tier == FAST and trial.figures is not None and trial.figures.ci_high > 1


def places(judged: int, last: bool) -> int:
    """How many of so many fast trials may go on, in all."""
    share = judged // TWENTY
    return max(FEW, share) if last else max(0, share - 1)


def promoted(trials: Sequence[Trial], last: bool = False) -> list[Trial]:
    """The fast trials whose forwards go on now, best first. `last`: the search is over, no more fast trials come."""
    judged = [trial for trial in trials if trial.tier == FAST and trial.done and trial.outcome not in UNJUDGED]
    gone = {trial.forward for trial in trials if trial.tier == SLOW}
    allowed = places(len(judged), last)
    best = sorted(filter(hopeful, judged), key=_ratio, reverse=True)[:allowed]
    return [trial for trial in best if trial.forward not in gone][: max(0, allowed - len(gone))]


def _ratio(trial: Trial) -> float:
    return trial.figures.ratio if trial.figures else 0.0


class Promotion:
    """Sends on what the policy says. Any number of processes may call `step` at once."""

    def __init__(self, night: Path, forwards: Path, engine: EngineClient) -> None:
        self.night, self.forwards, self.engine = night, forwards, engine
        self.board = Board(night / "board.jsonl")

    def step(self, last: bool = False) -> list[str]:
        """Ids of the slow trials that this call began."""
        with self._alone():
            found = [(trial, self._source(trial)) for trial in promoted(self.engine.trials(), last)]
            return [self._send(trial, forward) for trial, forward in found if forward is not None]

    def try_step(self) -> None:
        """A step, if the engine answers at all: it may be starting again."""
        with contextlib.suppress(UserError, ProtocolError):
            self.step()

    def finish(self, deadline: float, cancel: Callable[[str], object]) -> None:
        """Sends on the last ones and waits for every slow trial, until `deadline` (seconds since the epoch).

        Fast trials that still wait may be among the best, so they get a third of the time; what waits then is cancelled.
        """
        self._await(FAST, time.time() + (deadline - time.time()) / 3)
        if not any(one.tier == SLOW and not one.done for one in self.engine.trials()):
            cancel("screening ended before this candidate's turn")
        self._await(FAST, deadline)  # the one that runs: whatever goes on would wait for it anyway
        self.step(last=True)
        self._await(SLOW, deadline)

    def _await(self, tier: str, until: float) -> None:
        while time.time() < until and any(not trial.done for trial in self.engine.trials() if trial.tier == tier):
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.night / "promotion.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _source(self, trial: Trial) -> Forward | None:
        """None when somebody has changed it since: what goes on is what was screened."""
        with contextlib.suppress(CandidateError, OSError, ValueError):
            forward = Forward.load(self.forwards / trial.forward)
            if forward.id == trial.forward:
                return forward
        log_event(self.night, "not_promoted", fast=trial.id, reason="its source on disk is not what was submitted")
        return None

    def _send(self, trial: Trial, forward: Forward) -> str:
        name = self.engine.submit(forward, SLOW, trial.submitter)
        log_event(self.night, "promoted", fast=trial.id, slow=name, ratio=_ratio(trial))
        rewrites = next((post.rewrites for post in self.board.posts() if post.trial == trial.id and post.rewrites), ())
        text = f"{trial.id} goes on to the slow tier as {name}; it had a ratio of {_ratio(trial):.3f} on the fast tier"
        self.board.post(NAME, "note", text, name, rewrites)
        return name
