"""What a measurement raises, and under which load: the endpoint's objective as trials and verification measure it.

Output tokens/s of single requests are timed step by step, both sides in turn (`measure.lockstep`). Everything else needs whole
replays of a load (`load.py`): a first token's wait is made by the requests around it, a later turn's by the prefix cache.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from tideforge.data.workload import RequestShape
from tideforge.engine.load import Closed, Load, LoadBlock, Open, fitting
from tideforge.engine.measure import Block, percentile, user_tps
from tideforge.errors import UserError

FIGURES = ("output_tps", "tps_per_user_p90", "ttft")  # the endpoint's fourth, cost, is output_tps on given hardware
UNITS = {"output_tps": ("more", "tokens/s"), "tps_per_user_p90": ("more", "tokens/s per user"), "ttft": ("less", "ms")}
ARRIVALS = ("closed", "open")
CONVERSATIONS_A_USER = 2  # of one replay of a load


@dataclasses.dataclass(frozen=True)
class Objective:
    """`maximize` is one of FIGURES (ttft: P90, the less the better); the traffic's arrivals count under open arrivals only."""

    maximize: str = "output_tps"
    arrivals: str = "closed"
    pace: float = 1.0  # time runs so many times as fast as in the traffic
    think_s: float | None = (
        0.0  # closed: a user's pause before whatever it says next; None: before turns, as in the traffic
    )

    def __post_init__(self) -> None:
        for field, value, known in (("maximize", self.maximize, FIGURES), ("arrivals", self.arrivals, ARRIVALS)):
            if value not in known:
                raise UserError(
                    f"objective.{field}", f"{value!r} cannot be measured", f"choose one of {', '.join(known)}"
                )
        if not 0 < self.pace < math.inf:
            raise UserError("objective.pace", f"{self.pace:g} is no pace", "give a number above 0")
        if self.think_s is not None and not 0 <= self.think_s < math.inf:
            raise UserError("objective.think_s", f"{self.think_s:g} s is no pause", "give 0 or more seconds")

    def by_loads(self, part: Sequence[RequestShape]) -> bool:
        """Whether a part of the workload is replayed as whole loads, and not step by step."""
        alone = self.arrivals == "closed" and not self.think_s and not any(shape.turns for shape in part)
        return self.maximize != "output_tps" or not alone

    def worth(self, block: Block | LoadBlock) -> float:
        """The figure to raise: tokens/s, or for ttft one over seconds."""
        if self.maximize == "ttft":
            return 1 / percentile([answer.ttft_s for answer in block.answers], 0.9)
        return user_tps([Block(block.seconds, block.answers)])[1] if self.maximize != "output_tps" else block.output_tps

    def words(self) -> dict[str, Any]:
        """Name, direction and unit, as a trial's figures state them."""
        better, unit = UNITS[self.maximize]
        return {"objective": self.maximize, "better": better, "unit": unit}

    def told(self, blocks: Sequence[tuple[Block, Block]]) -> dict[str, Any]:
        """The fields of Figures that name the objective, with both sides' medians over the blocks (incumbent's, candidate's)."""
        incumbent, candidate = (statistics.median(map(self.worth, side)) for side in zip(*blocks, strict=True))
        if self.maximize == "ttft":
            incumbent, candidate = 1e3 / incumbent, 1e3 / candidate
        return {**self.words(), "candidate": candidate, "incumbent": incumbent}

    def load_of(self, part: Sequence[RequestShape], users: int, longest: int, rng: random.Random) -> Load:
        """A load of conversations drawn from the part: for open arrivals a stretch of them, from its first one on.

        Turns that make a conversation longer than `longest` tokens are left out.
        """
        shapes = [fitting(shape, longest) for shape in part]
        count = min(len(shapes), CONVERSATIONS_A_USER * users)
        if self.arrivals == "closed":
            return self._closed(users, rng.sample(shapes, count))
        begin = rng.randrange(len(shapes) - count + 1)
        stretch = shapes[begin : begin + count]
        return Open(
            tuple(dataclasses.replace(s, arrival_s=s.arrival_s - stretch[0].arrival_s) for s in stretch), self.pace
        )

    def _closed(self, users: int, shapes: Sequence[RequestShape]) -> Closed:
        if self.think_s is None:
            return Closed(users, tuple(shapes), self.pace)
        paused = [tuple(dataclasses.replace(turn, think_s=self.think_s) for turn in shape.turns) for shape in shapes]
        spoken = (dataclasses.replace(shape, turns=turns) for shape, turns in zip(shapes, paused, strict=True))
        return Closed(users, tuple(spoken), think_s=self.think_s)

    def scripted_s(self, part: Sequence[RequestShape], users: int) -> float:
        """Seconds that the longest replay lasts however fast the engine is: arrivals and pauses."""
        if self.arrivals == "closed":
            longest = max(sum(turn.think_s for turn in talk.turns) for talk in self._closed(users, part).conversations)
            return CONVERSATIONS_A_USER * longest / self.pace + (CONVERSATIONS_A_USER - 1) * (self.think_s or 0.0)
        count = min(len(part), CONVERSATIONS_A_USER * users)
        ends = [shape.arrival_s + sum(turn.think_s for turn in shape.turns) for shape in part]
        longest = max(
            max(ends[begin : begin + count]) - part[begin].arrival_s for begin in range(len(part) - count + 1)
        )
        return longest / self.pace
