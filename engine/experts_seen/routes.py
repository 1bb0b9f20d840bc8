"""What a model's routers choose, read off the fp32 reference while it computes: its arithmetic is left as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tideforge.costmodel.passes import coverage
from tideforge.engine.arithmetic import Arithmetic
from tideforge.engine.reference_model import ReferenceModel, _Run


class _Watching(_Run):
    """Keeps of each mixture the chosen experts [T, k] and what went in [T, hidden]; of each layer its input's root mean square."""

    def __init__(self, model: ReferenceModel, lengths: list[int]) -> None:
        super().__init__(model, Arithmetic(), lengths)
        self.chosen: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.sizes: list[float] = []

    def layer(self, x: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        self.sizes.append(float(x.pow(2).mean().sqrt()))
        return super().layer(x, index)

    def experts(self, x: Tensor, chosen: Tensor, name: str, parts: tuple[str, str, str]) -> Tensor:
        self.chosen.append(chosen)
        self.inputs.append(x)
        return super().experts(x, chosen, name, parts)


class Routes:
    """What some sequences of one length T have made the routers do."""

    def __init__(self, run: _Watching) -> None:
        shape = (len(run.lengths), run.lengths[0])
        self.chosen = torch.stack(run.chosen).unflatten(1, shape)  # [mixtures, sequences, T, k]
        self.inputs = torch.stack(run.inputs).unflatten(1, shape)  # [mixtures, sequences, T, hidden]
        self.sizes = tuple(run.sizes)  # of all layers


class Router(ReferenceModel):
    """A checkpoint with mixtures, asked for its routers' choices."""

    @torch.inference_mode()
    def routes(self, sequences: Sequence[Sequence[int]]) -> Routes:
        """Of sequences of one length. ValueError for an id that the vocabulary does not have."""
        run = _Watching(self, [len(sequence) for sequence in sequences])
        self._through(run, [token for sequence in sequences for token in sequence], [0], None)
        return Routes(run)

    @torch.inference_mode()
    def routes_of_noise(
        self, sequences: int, length: int, sizes: Sequence[float], generator: torch.Generator
    ) -> Routes:
        """Each layer gets Gaussian noise of root mean square `sizes[layer]` as its input, whatever the layer before said."""
        run = _Watching(self, [length] * sequences)
        for index, size in enumerate(sizes):
            run.layer(size * torch.randn(sequences * length, self.config.hidden_size, generator=generator), index)
        return Routes(run)


def distinct(chosen: Tensor, experts: int) -> Tensor:
    """How many experts a step's tokens activate: chosen [..., N, k] -> [...]."""
    ids = chosen.flatten(-2)
    return torch.zeros(*ids.shape[:-1], experts, dtype=torch.bool).scatter_(-1, ids, True).sum(-1)


def even(experts: int, per_token: int, tokens: int) -> float:
    """What a router that spreads evenly would activate in the mean."""
    return coverage(experts, per_token, tokens)


def steps(chosen: Tensor, experts: int, tokens: int, draws: int, generator: torch.Generator) -> Tensor:
    """Mean over `draws` decode steps, [mixtures]: `tokens` of the sequences, each at a place of its own; chosen [mixtures, S, T, k]."""
    _, sequences, places, _ = chosen.shape
    who = torch.rand(draws, sequences, generator=generator).argsort(1)[:, :tokens]
    where = torch.randint(places, (draws, tokens), generator=generator)
    return distinct(chosen[:, who, where], experts).double().mean(1)


def in_a_row(chosen: Tensor, experts: int, tokens: int, draws: int, generator: torch.Generator) -> Tensor:
    """As `steps`, but `tokens` neighbours in one sequence, as in a chunk of a prompt or where several guesses are checked at once."""
    _, sequences, places, _ = chosen.shape
    who = torch.randint(sequences, (draws, 1), generator=generator)
    first = torch.randint(places - tokens + 1, (draws, 1), generator=generator)
    return distinct(chosen[:, who, first + torch.arange(tokens)], experts).double().mean(1)
