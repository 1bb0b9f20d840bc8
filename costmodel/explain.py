"""What a ranking would be elsewhere: where its winner changes with the load, with prompts twice as long, and which layouts are on
the front of tokens/s a user against tokens/s a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tideforge.costmodel.layouts import Layout
from tideforge.costmodel.predict import Traffic
from tideforge.costmodel.rank import Ranking, rank

FACTORS = tuple(2.0**power for power in range(-4, 5))  # of the users that were asked about


@dataclasses.dataclass(frozen=True)
class Change:
    """From `users` on (between the two loads that were priced, in the logarithm) another layout is first."""

    users: float
    before: str
    after: str
    tied: bool  # at the higher of the two, `before` cannot be told from the first


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """No other layout and load gives both more tokens/s a user and more a GPU."""

    users: float
    layout: str
    tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float


@dataclasses.dataclass(frozen=True)
class Explained:
    users: tuple[float, ...]  # the loads that were priced
    winners: tuple[str, ...]
    changes: tuple[Change, ...]
    doubled_prompts: str  # winner of the same load with prompts twice as long
    doubled_prompts_ratio: float  # its output tokens/s over those of the winner now
    front: tuple[FrontPoint, ...]


def explained(answer: Ranking) -> Explained | None:
    """None where nothing is legal. Loads at which no layout is legal are left out."""
    q = answer.question
    if not answer.ranked:
        return None
    rankings = [rank(dataclasses.replace(q, traffic=_with_users(q.traffic, factor))) for factor in FACTORS]
    priced = [one for one in rankings if one.ranked]
    users = tuple(one.question.traffic.users for one in priced)
    winners = tuple(str(one.ranked[0].layout) for one in priced)
    changes = [
        Change(
            (users[at] * users[at + 1]) ** 0.5, winners[at], winners[at + 1],
            _tied(priced[at + 1], priced[at].ranked[0].layout),
        )
        for at in range(len(priced) - 1)
        if winners[at] != winners[at + 1]
    ]  # fmt: skip
    longer = rank(dataclasses.replace(q, traffic=_doubled(q.traffic)))
    worth = longer.ranked[0].prediction.output_tokens_per_s if longer.ranked else 0.0
    return Explained(
        users, winners, tuple(changes),
        str(longer.ranked[0].layout) if longer.ranked else "none is legal",
        worth / answer.ranked[0].prediction.output_tokens_per_s, front(priced),
    )  # fmt: skip


def _with_users(traffic: Traffic, factor: float) -> Traffic:
    return dataclasses.replace(traffic, users=traffic.users * factor)


def _doubled(traffic: Traffic) -> Traffic:
    return dataclasses.replace(
        traffic,
        prompt_tokens=2 * traffic.prompt_tokens,
        longest_tokens=traffic.longest_tokens + traffic.prompt_tokens if traffic.longest_tokens else 0.0,
        prompts=tuple((share, 2 * tokens) for share, tokens in traffic.prompts),
        decode_context=traffic.decode_context + traffic.prompt_tokens if traffic.decode_context else 0.0,
    )


def _tied(answer: Ranking, layout: Layout) -> bool:
    """Whether a layout is first there too, or cannot be told from the first."""
    return any(entry.layout == layout and entry.tied for entry in answer.ranked)


def front(rankings: Sequence[Ranking]) -> tuple[FrontPoint, ...]:
    """From the most tokens/s a user to the most a GPU."""
    points = [
        FrontPoint(
            one.question.traffic.users, str(entry.layout), p.tokens_per_s_per_user, p.output_tokens_per_s_per_gpu
        )
        for one in rankings
        for entry in one.ranked
        for p in (entry.prediction,)
    ]
    kept: list[FrontPoint] = []
    for point in sorted(points, key=lambda one: (-one.tokens_per_s_per_user, -one.output_tokens_per_s_per_gpu)):
        if not kept or point.output_tokens_per_s_per_gpu > kept[-1].output_tokens_per_s_per_gpu:
            kept.append(point)
    return tuple(kept)


def lines(found: Explained) -> list[str]:
    said = [
        f"around {change.users:.0f} users {change.after} takes over from {change.before}"
        + (", though the two cannot be told apart there" if change.tied else "")
        for change in found.changes
    ]
    if not said:
        said = [f"from {min(found.users):.0f} to {max(found.users):.0f} users {found.winners[0]} stays first"]
    said.append(
        f"with prompts twice as long {found.doubled_prompts} is first, at {found.doubled_prompts_ratio:.2f} times the output tokens/s"
    )
    said.append("tokens/s a user against tokens/s a GPU, what nothing else beats in both:")
    most = max(point.output_tokens_per_s_per_gpu for point in found.front)
    for point in found.front:
        bar = "#" * max(1, round(40 * point.output_tokens_per_s_per_gpu / most))
        said.append(
            f"{point.tokens_per_s_per_user:9.1f} a user {point.output_tokens_per_s_per_gpu:9.1f} a GPU  {point.layout:22} "
            f"{point.users:7.0f} users  {bar}"
        )
    return said
