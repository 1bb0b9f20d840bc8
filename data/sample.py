"""Samples a workload from a profile: concrete requests to replay, scaled down to what a trial can afford.

Requests are drawn from the joint histogram in strata of equal probability. Prompt lengths go through one monotone map,
so the order of the requests by prompt length is kept. What the scaling loses is measured and stated in the notes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tideforge.data.distribution import outputs, prompts, rank_correlation
from tideforge.data.profile_records import Profile, Turns, bin_edges
from tideforge.data.workload import RequestShape, Turn, Workload
from tideforge.errors import UserError

MOST_TURNS = 16  # of a conversation: one that never ends would decide a replay


@dataclasses.dataclass(frozen=True)
class PromptMap:
    """Maps a length to [low, high], linearly in its logarithm; lengths outside [least, most] are clipped."""

    least: int
    most: int
    low: int
    high: int

    def scaled(self, length: float) -> int:
        span = math.log(self.most / self.least)
        share = math.log(length / self.least) / span if span else 0.5
        return math.floor(self.low + min(max(share, 0.0), 1.0) * (self.high - self.low) + 0.5)

    def original(self, scaled: float) -> float:
        """Inverse of the map before rounding."""
        if self.high == self.low:
            return float(self.most)
        return float(self.least * (self.most / self.least) ** ((scaled - self.low) / (self.high - self.low)))


def sample_workload(
    profile: Profile,
    *,
    users: int,
    prompt_tokens: tuple[int, int],
    output_tokens: int,
    search_output_tokens: int,
    corpus_ids: Sequence[int],
    seed: int,
    search_requests: int | None = None,
    held_out_requests: int | None = None,
) -> Workload:
    """A search part (4 requests a user unless said) and a held-out part (8 a user). Same arguments, same bytes.

    `corpus_ids` are the token ids of real text that prompts are cut from, half for each part.
    """
    low, high = prompt_tokens
    if not 1 <= low <= high:
        raise UserError("workload.prompt_tokens", f"{low} to {high} is not a range", "give [least, most], least >= 1")
    if len(corpus_ids) < 4 * high:
        raise UserError("corpus", f"has {len(corpus_ids)} tokens for prompts of up to {high}", "give a longer text")
    search_count, held_out_count = search_requests or 4 * users, held_out_requests or 8 * users
    mapping = PromptMap(profile.prompt.quantiles["p1"], profile.prompt.quantiles["p99"], low, high)
    generator = np.random.Generator(np.random.PCG64(seed))
    lengths = [mapping.scaled(length) for length in drawn_prompts(profile, search_count + held_out_count, generator)]
    search, held_out = lengths[:search_count], lengths[search_count:]
    return Workload(
        users=users,
        search=shapes(search, search_output_tokens, profile, mapping, generator),
        held_out=shapes(held_out, output_tokens, profile, mapping, generator),
        corpus=tuple(int(token) for token in corpus_ids),
        profile=profile.sha256,
        seed=seed,
        context_p99=profile.context.quantiles["p99"],
        notes=notes(profile, mapping, users, search, held_out, (search_output_tokens, output_tokens)),
    )


def drawn_prompts(profile: Profile, count: int, generator: np.random.Generator) -> list[float]:
    """`count` prompt lengths in random order; one from each stratum of the joint histogram, so parts are alike."""
    weights = np.array([requests for _, _, requests in profile.joint], dtype=np.float64)
    places = (np.arange(count) + generator.random(count)) / count * weights.sum()
    cells = np.minimum(np.searchsorted(np.cumsum(weights), places, side="right"), len(weights) - 1)
    inside = generator.random(count)
    order = np.argsort(generator.random(count), kind="stable")
    lengths = []
    for place in order:
        least, above = bin_edges(profile.joint[int(cells[place])][0])
        lengths.append(least * (above / least) ** float(inside[place]))
    return lengths


def shapes(
    lengths: Sequence[int], output_tokens: int, profile: Profile, mapping: PromptMap, generator: np.random.Generator
) -> tuple[RequestShape, ...]:
    """Arrivals are a Poisson process at the profile's mean rate, from 0; conversations as in the profile, if it has any."""
    gaps = -np.log1p(-generator.random(len(lengths))) / profile.arrivals.mean_per_s
    arrivals = np.cumsum(gaps) - gaps[0]
    scale = mapping.scaled(profile.prompt.quantiles["p50"]) / profile.prompt.quantiles["p50"]
    return tuple(
        RequestShape(length, output_tokens, round(float(at), 6), turns(profile.turns, scale, output_tokens, generator))
        for length, at in zip(lengths, arrivals, strict=True)
    )


def turns(profile: Turns | None, scale: float, output_tokens: int, generator: np.random.Generator) -> tuple[Turn, ...]:
    """Later turns, one with the profile's probability after each, with lengths scaled and pauses drawn between its quantiles."""
    drawn: list[Turn] = []
    while profile and len(drawn) < MOST_TURNS - 1 and generator.random() < profile.continued_share:
        tokens = between(profile.new_tokens, generator.random()) * scale
        think_s = round(between(profile.think_s, generator.random()), 3)
        drawn.append(Turn(max(1, round(tokens)), output_tokens, think_s))
    return tuple(drawn)


def between(quantiles: Mapping[str, float], share: float) -> float:
    """Value at `share` of the distribution, linear between the quantiles that are known ("p50": ...)."""
    known = sorted((float(name[1:]) / 100, value) for name, value in quantiles.items())
    return float(np.interp(share, [at for at, _ in known], [value for _, value in known]))


def ks_prompts(profile: Profile, mapping: PromptMap, lengths: Sequence[int]) -> float:
    """Kolmogorov-Smirnov distance of scaled lengths to the profile's prompt lengths under the same map, 0 to 1."""
    target = prompts(profile.joint)
    worst = 0.0
    for value in range(mapping.low, mapping.high):
        have = sum(length <= value for length in lengths) / len(lengths)
        worst = max(worst, abs(have - target.cdf(mapping.original(value + 0.5))))
    return worst


def ks_constant_output(profile: Profile) -> float:
    """The same for output lengths that are all equal, with the profile scaled so that its median is that length."""
    target, median = outputs(profile.joint), profile.output.quantiles["p50"]
    return max(target.cdf(median), 1 - target.cdf(median + 1))


def notes(
    profile: Profile,
    mapping: PromptMap,
    users: int,
    search: Sequence[int],
    held_out: Sequence[int],
    output_tokens: tuple[int, int],
) -> tuple[str, ...]:
    ks = [ks_prompts(profile, mapping, part) for part in (search, held_out)]
    lines = [
        f"prompt lengths: P1 to P99 of the profile ({mapping.least} to {mapping.most} tokens) are mapped to "
        f"{mapping.low} to {mapping.high}, linearly in the logarithm; order is kept, ratios and tails are lost",
        f"prompt lengths after scaling are within a KS distance of {ks[0]:.3f} (search) and {ks[1]:.3f} (held out) "
        "of the profile's under the same map",
        f"output lengths are all {output_tokens[0]} (search) and {output_tokens[1]} (held out) where the profile has "
        f"P50 {profile.output.quantiles['p50']} and P99 {profile.output.quantiles['p99']}: KS distance "
        f"{ks_constant_output(profile):.3f} after scaling the medians together",
        f"the rank correlation of prompt and output length, {rank_correlation(profile.joint):.2f} in the profile, is "
        "lost with the output lengths",
        f"{users} users at once where the profile has {profile.concurrency.mean:.1f} requests in flight on average "
        f"and {profile.concurrency.most} at most",
        f"arrivals are Poisson at {profile.arrivals.mean_per_s:.3g} requests/s; a closed load ignores them",
    ]
    if profile.prefixes.repeated_share is not None:
        lines.append(
            f"shared prefixes ({profile.prefixes.repeated_share:.0%} of the profile's blocks) are replayed between the "
            "turns of a conversation only"
        )
    if profile.turns is not None:
        lines.append(
            f"{profile.turns.continued_share:.0%} of the requests have a later turn, drawn independently, {MOST_TURNS} turns "
            "at most; what a turn adds is scaled as the median prompt is; loads without conversations replay first turns only"
        )
    return tuple(lines)
