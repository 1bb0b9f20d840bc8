"""Samples a workload from a profile: concrete requests to replay, scaled down to what a trial can afford.

Requests are drawn from the joint histogram in strata of equal probability. Lengths go through one monotone map each, so
the order of the requests by length is kept. What the scaling loses is measured and stated in the notes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tideforge.data.distribution import outputs, rank_correlation
from tideforge.data.fidelity import Fidelity, fidelity
from tideforge.data.length_map import LengthMap
from tideforge.data.profile_records import Cells, Lengths, Profile, bin_edges
from tideforge.data.workload import RequestShape, Turn, Workload
from tideforge.errors import UserError

MOST_TURNS = 16  # of a conversation: one that never ends would decide a replay
MOST_GAP_CV = 4.0  # above, a workload's few arrivals would be one burst or none


Range = tuple[int, int]


def sample_workload(
    profile: Profile,
    *,
    users: int,
    prompt_tokens: Range,
    output_tokens: int | Range,
    search_output_tokens: int | Range,
    corpus_ids: Sequence[int],
    seed: int,
    later: Profile | None = None,
    search_requests: int | None = None,
    held_out_requests: int | None = None,
) -> Workload:
    """A search part (4 requests a user unless said) and a held-out part (8 a user). Same arguments, same bytes.

    `corpus_ids` are the token ids of real text that prompts are cut from, half for each part. The held-out part is drawn from
    `later`, where it is given, the traffic that came after `profile`'s; both are scaled alike. Output lengths are all the same
    (a number), or drawn together with the prompt and scaled to a range.
    """
    low, high = prompt_tokens
    if not 1 <= low <= high:
        raise UserError("workload.prompt_tokens", f"{low} to {high} is not a range", "give [least, most], least >= 1")
    if len(corpus_ids) < 4 * high:
        raise UserError("corpus", f"has {len(corpus_ids)} tokens for prompts of up to {high}", "give a longer text")
    generator = np.random.Generator(np.random.PCG64(seed))
    prompts = length_map(profile.prompt, prompt_tokens)
    parts = [
        Part(
            "search", profile, prompts, length_map(profile.output, span("search_output_tokens", search_output_tokens))
        ),
        Part("held out", later or profile, prompts, length_map(profile.output, span("output_tokens", output_tokens))),
    ]
    counts = (search_requests or 4 * users, held_out_requests or 8 * users)
    search, held_out = (part.shapes(count, generator) for part, count in zip(parts, counts, strict=True))
    return Workload(
        users=users,
        search=search,
        held_out=held_out,
        corpus=tuple(int(token) for token in corpus_ids),
        profile=profile.sha256,
        seed=seed,
        context_p99=max(part.profile.context.quantiles["p99"] for part in parts),
        notes=notes(parts, (search, held_out), users),
    )


def span(field: str, tokens: int | Range) -> Range:
    low, high = (tokens, tokens) if isinstance(tokens, int) else tokens
    if not 2 <= low <= high:
        raise UserError(f"workload.{field}", f"{low} to {high} is not a range", "give [least, most], least >= 2")
    return low, high


def length_map(lengths: Lengths, tokens: Range) -> LengthMap:
    return LengthMap(lengths.quantiles["p1"], lengths.quantiles["p99"], *tokens)


@dataclasses.dataclass(frozen=True)
class Part:
    """Whence a part of a workload is drawn, and how it is scaled."""

    name: str
    profile: Profile
    prompts: LengthMap
    outputs: LengthMap

    def shapes(self, count: int, generator: np.random.Generator) -> tuple[RequestShape, ...]:
        """`count` requests in random order, one from each stratum of the joint histogram, so that parts are alike."""
        scale = self.prompts.scaled(self.profile.prompt.quantiles["p50"]) / self.profile.prompt.quantiles["p50"]
        lengths = drawn_lengths(self.profile.joint, count, generator)
        moments = arrivals(self.profile, count, generator)
        return tuple(
            RequestShape(
                self.prompts.scaled(prompt), self.outputs.scaled(output), at, tuple(self.turns(scale, generator))
            )
            for (prompt, output), at in zip(lengths, moments, strict=True)
        )

    def turns(self, scale: float, generator: np.random.Generator) -> Iterator[Turn]:
        """Later turns, one with the profile's probability after each, with lengths scaled and pauses drawn between its quantiles."""
        known, answers = self.profile.turns, outputs(self.profile.joint)
        for _ in range(MOST_TURNS - 1 if known else 0):
            assert known is not None
            if generator.random() >= known.continued_share:
                return
            tokens = between(known.new_tokens, generator.random()) * scale
            think_s = round(between(known.think_s, generator.random()), 3)
            yield Turn(max(1, round(tokens)), self.outputs.scaled(answers.quantile(generator.random())), think_s)

    def fidelity(self, shapes: Sequence[RequestShape]) -> Fidelity:
        return fidelity(self.profile.joint, self.prompts, self.outputs, shapes)


def drawn_lengths(cells: Cells, count: int, generator: np.random.Generator) -> list[tuple[float, float]]:
    """Prompt and output lengths, from the same cell; inside a cell they are uniform in their logarithms."""
    weights = np.array([requests for _, _, requests in cells], dtype=np.float64)
    places = (np.arange(count) + generator.random(count)) / count * weights.sum()
    chosen = np.minimum(np.searchsorted(np.cumsum(weights), places, side="right"), len(weights) - 1)
    inside = generator.random((count, 2))
    order = np.argsort(generator.random(count), kind="stable")
    return [
        (within(cells[chosen[place]][0], inside[place, 0]), within(cells[chosen[place]][1], inside[place, 1]))
        for place in order
    ]


def within(index: int, share: float) -> float:
    least, above = bin_edges(index)
    return float(least * (above / least) ** share)


def arrivals(profile: Profile, count: int, generator: np.random.Generator) -> list[float]:
    """Seconds, from 0: gaps from a gamma distribution with the profile's mean and coefficient of variation, at most
    MOST_GAP_CV (1, a Poisson process, where the profile has none)."""
    variation = min(max(profile.arrivals.gap_cv or 1.0, 1e-3), MOST_GAP_CV)
    gaps = generator.gamma(1 / variation**2, variation**2 / profile.arrivals.mean_per_s, count)
    return [round(float(at), 6) for at in np.cumsum(gaps) - gaps[0]]


def between(quantiles: Mapping[str, float], share: float) -> float:
    """Value at `share` of the distribution, linear between the quantiles that are known ("p50": ...)."""
    known = sorted((float(name[1:]) / 100, value) for name, value in quantiles.items())
    return float(np.interp(share, [at for at, _ in known], [value for _, value in known]))


def ks_constant_output(profile: Profile) -> float:
    """Kolmogorov-Smirnov distance of output lengths that are all equal, with the profile scaled so that its median is that length."""
    target, median = outputs(profile.joint), profile.output.quantiles["p50"]
    return max(target.cdf(median), 1 - target.cdf(median + 1))


def notes(parts: Sequence[Part], shapes: Sequence[Sequence[RequestShape]], users: int) -> tuple[str, ...]:
    """What scaling did, what it lost, and how near the parts are to what they were drawn from."""
    profile, mapping = parts[0].profile, parts[0].prompts
    lines = [
        f"prompt lengths: P1 to P99 of the profile ({mapping.least} to {mapping.most} tokens) are mapped to "
        f"{mapping.low} to {mapping.high}, linearly in the logarithm; order is kept, ratios and tails are lost",
    ]
    for part, drawn in zip(parts, shapes, strict=True):
        lines += part_notes(part, part.fidelity(drawn))
    lines.append(
        f"{users} users at once where the profile has {profile.concurrency.mean:.1f} requests in flight on average "
        f"and {profile.concurrency.most} at most; a closed load ignores arrivals"
    )
    if parts[0].profile is not parts[1].profile:
        lines.append(
            f"the search part is drawn from the {profile.requests} earlier requests, the held-out part from the "
            f"{parts[1].profile.requests} later ones, where a conversation that goes on is one that begins"
        )
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


def part_notes(part: Part, near: Fidelity) -> Iterator[str]:
    profile, scaled = part.profile, part.outputs
    variation = f"{profile.arrivals.gap_cv:.2f}" if profile.arrivals.gap_cv is not None else "unknown, Poisson taken"
    yield (
        f"{part.name}: KS distance to the profile, scaled alike: prompts {near.prompt:.3f}, outputs {near.output:.3f}, both together "
        f"{near.joint:.3f}; gaps between arrivals vary by {near.gap_cv:.2f} of their mean (profile: {variation}, at "
        f"{profile.arrivals.mean_per_s:.3g} requests/s)"
    )
    if scaled.low < scaled.high:
        yield (
            f"{part.name}: output lengths, {scaled.least} to {scaled.most} tokens from P1 to P99, are mapped to {scaled.low} to "
            f"{scaled.high}, linearly in the logarithm, and drawn with the prompt's"
        )
        return
    yield (
        f"{part.name}: output lengths are all {scaled.low} where the profile has P50 {profile.output.quantiles['p50']} and P99 "
        f"{profile.output.quantiles['p99']}: KS distance {ks_constant_output(profile):.3f} after scaling the medians together, and the "
        f"rank correlation with the prompt's, {rank_correlation(profile.joint):.2f}, is lost"
    )
