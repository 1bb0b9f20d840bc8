"""Counts experts by kind of token over several seeds, and compares kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tideforge.engine.experts_seen.drawn import CORPUS, RANDOM, Ids, Speaker, sequences_of
from tideforge.engine.experts_seen.routes import Router, Routes, even, in_a_row, steps
from tideforge.engine.measure import Interval, interval
from tideforge.errors import UserError

TOKENS = (1, 2, 4, 8, 16, 32, 64)
SAID, SAID_RANDOM, NOISE = "said", "said behind random", "activations"
IN_A_ROW = ", in a row"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of each seed: `sequences` of `length` tokens a kind; a step takes its tokens at places from `prompt` on, each of a sequence of its
    own. `draws` steps are averaged."""

    seeds: int = 6
    sequences: int = 64
    prompt: int = 32
    length: int = 128
    draws: int = 256
    said: bool = True  # also what the model itself says, which takes half of the time

    def __post_init__(self) -> None:
        if not 0 < self.prompt < self.length or self.seeds < 2 or self.sequences < 1 or self.draws < 1:
            raise UserError("the plan", "has a count that is too small", "take two seeds and a prompt under the length")

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(n for n in TOKENS if n <= min(self.sequences, self.length - self.prompt))


@dataclasses.dataclass(frozen=True)
class Seen:
    """Experts a step and layer with mixtures, by kind: [seeds, sizes of a step, layers], means over steps.

    A step's tokens are of as many sequences, or, of kinds that end in IN_A_ROW, neighbours in one, as in a chunk of a prompt.
    """

    counts: Mapping[str, Tensor]
    tokens: tuple[int, ...]
    experts: int
    per_token: int

    def mean(self, kind: str, tokens: int) -> Interval:
        """Over layers, with the spread over seeds."""
        return interval(self._of(kind, tokens).mean(1).tolist())

    def layers(self, kind: str, tokens: int) -> list[float]:
        return [float(count) for count in self._of(kind, tokens).mean(0)]

    def excess(self, kind: str, over: str, tokens: int, layer: int | None = None) -> Interval:
        """Experts of `kind` over those of `over`, seed by seed; of one layer, or of all together, which is bytes of experts over bytes."""
        pair = (self._of(name, tokens) for name in (kind, over))
        a, b = (count.mean(1) if layer is None else count[:, layer] for count in pair)
        return interval((a / b).tolist())

    def even(self, tokens: int) -> float:
        return even(self.experts, self.per_token, tokens)

    def _of(self, kind: str, tokens: int) -> Tensor:
        return self.counts[kind][:, self.tokens.index(tokens)]


def measure(
    model: Path, texts: Mapping[str, Sequence[int]], plan: Plan, say: Callable[[str], None] = lambda line: None
) -> Seen:
    """Raises UserError for a model without experts, or a text that is shorter than the plan's sequences."""
    router = Router(model)
    experts, per_token = router.config.num_local_experts, router.config.num_experts_per_tok
    if not any(router.config.is_sparse(layer) for layer in range(router.config.num_hidden_layers)):
        raise UserError(str(model), "has no mixture of experts", "name a model that has")
    found: dict[str, list[Tensor]] = {}
    with TemporaryDirectory() as state:
        speaker = Speaker(model, Path(state), plan.sequences, plan.length) if plan.said else None
        for seed in range(plan.seeds):
            for kind, routes in routes_of(router, speaker, texts, plan, seed).items():
                found.setdefault(kind, []).append(_counts(steps, routes, experts, plan, seed))
                found.setdefault(kind + IN_A_ROW, []).append(_counts(in_a_row, routes, experts, plan, seed))
            say(f"seed {seed}")
    return Seen({kind: torch.stack(counts) for kind, counts in found.items()}, plan.tokens, experts, per_token)


def routes_of(
    router: Router, speaker: Speaker | None, texts: Mapping[str, Sequence[int]], plan: Plan, seed: int
) -> dict[str, Routes]:
    """What each kind of token makes the routers do."""
    drawn = sequences_of(texts, router.config.vocab_size, plan.sequences, plan.length, seed)
    if speaker is not None:
        drawn[SAID], drawn[SAID_RANDOM] = (said(speaker, drawn[kind], plan) for kind in (CORPUS, RANDOM))
    found = {kind: router.routes(sequences) for kind, sequences in drawn.items()}
    generator = torch.Generator().manual_seed(seed)
    found[NOISE] = router.routes_of_noise(plan.sequences, plan.length, found[CORPUS].sizes, generator)
    return found


def said(speaker: Speaker, sequences: Sequence[Ids], plan: Plan) -> list[Ids]:
    """The model's own answers behind the first tokens of each sequence."""
    return speaker.go_on([sequence[: plan.prompt] for sequence in sequences], plan.length - plan.prompt)


def _counts(take: Callable[..., Tensor], routes: Routes, experts: int, plan: Plan, seed: int) -> Tensor:
    """[sizes of a step, mixtures]; all kinds of a seed get the same sequences' numbers and places."""
    chosen, generator = routes.chosen[:, :, plan.prompt :], torch.Generator().manual_seed(seed)
    return torch.stack([take(chosen, experts, n, plan.draws, generator) for n in plan.tokens])
