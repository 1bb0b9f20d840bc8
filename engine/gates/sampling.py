"""Gate of sampling: at a temperature tokens are drawn as engine/sampler.py draws, from the reference's probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tideforge.engine.gates.caught import Caught
from tideforge.engine.gates.drawn import chi_square_limit, could_be, g_statistic, place, uniform
from tideforge.engine.gates.probe import Probe, Recorder, Row, drain
from tideforge.engine.scheduler import Sampling

PROMPT, TOKENS, REQUESTS = 16, 24, 8
BINS = 8
FALSE_ALARM = 1e-6  # of the test of a distribution
NUCLEUS = 0.8


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Requests of one replay: their prompts, tokens, and the logits that each token came from."""

    prompts: dict[str, tuple[int, ...]]
    chains: dict[str, list[int]]
    rows: dict[str, list[Row]]


def sampling(probe: Probe) -> dict[str, Any]:
    """Each token is what its seed and place draw from the logits that the authority sees; over all tokens the draws follow
    the reference's probabilities (a G-test at FALSE_ALARM); the same seeds give the same tokens, others others; so with top_p."""
    count = min(REQUESTS, probe.limits.max_num_seqs)
    prompts = dict(zip(map(str, range(count)), probe.spans([PROMPT] * count), strict=True))
    seeds, others = ([probe.secret() >> 1 for _ in range(count)] for _ in range(2))
    runs = [draw(probe, prompts, seeds, 1.0), draw(probe, prompts, seeds, 1.0), draw(probe, prompts, others, NUCLEUS)]
    if runs[0].chains != runs[1].chains:
        raise Caught(f"the same seeds drew other tokens, {first_difference(runs[0], runs[1])}")
    for run, own, top_p in ((runs[0], seeds, 1.0), (runs[2], others, NUCLEUS)):
        require_drawn(run, own, top_p)
    if runs[0].chains == runs[2].chains:
        raise Caught("other seeds drew the same tokens in all requests")
    g = {f"g_top_p_{top_p:g}": follow(probe, run, top_p) for run, top_p in ((runs[0], 1.0), (runs[2], NUCLEUS))}
    return {
        **g,
        "bound": chi_square_limit(BINS - 1, FALSE_ALARM),
        "tokens": 2 * count * TOKENS,
        "false_alarm": FALSE_ALARM,
    }


def draw(probe: Probe, prompts: dict[str, tuple[int, ...]], seeds: Sequence[int], top_p: float) -> Drawn:
    recorder = Recorder(probe.worker, probe.arena)
    requests = [
        dataclasses.replace(probe.request(name, prompt, TOKENS), sampling=Sampling(1.0, top_p, seed))
        for (name, prompt), seed in zip(prompts.items(), seeds, strict=True)
    ]
    chains = drain(probe.core(recorder), requests, len(requests))
    return Drawn(prompts, chains, recorder.rows)


def first_difference(a: Drawn, b: Drawn) -> str:
    for name, chain in a.chains.items():
        for index, (one, two) in enumerate(zip(chain, b.chains[name], strict=False)):
            if one != two:
                return f"request {name}, token {index}: {one}, then {two}"
    return "in number"


def require_drawn(run: Drawn, seeds: Sequence[int], top_p: float) -> None:
    """Raises Caught for a token that its row's logits, its seed and its place do not give."""
    for (name, chain), seed in zip(run.chains.items(), seeds, strict=True):
        for index, token in enumerate(chain):
            share = uniform(seed, len(run.prompts[name]) + index)
            if not could_be(token, run.rows[name][index].logits, 1.0, top_p, share):
                raise Caught(
                    f"request {name}, token {index}: emitted {token}, which seed {seed} does not draw from the row's logits"
                )


def follow(probe: Probe, run: Drawn, top_p: float) -> float:
    """G of the draws against the reference's probabilities, each token at a random place of its part, which makes them
    uniform whatever the context. Raises Caught beyond the limit, and for a token outside the reference's nucleus."""
    rng = np.random.default_rng(probe.secret())
    spans = [run.prompts[name] + tuple(chain) for name, chain in run.chains.items()]
    logits = probe.reference.after(spans, PROMPT, probe.layers)
    tokens = [token for span in spans for token in span[PROMPT:]]
    shares = []
    for row, (token, expected) in enumerate(zip(tokens, logits, strict=True)):
        begin, end, likelier = place(token, expected, 1.0, top_p)
        if likelier >= top_p * np.exp(2 * probe.bounds.logit):  # each probability moves by at most that factor
            raise Caught(
                f"request {row // TOKENS}, token {row % TOKENS}: {token} is outside the nucleus, {likelier:.4g} is likelier"
            )
        shares.append(begin + rng.random() * (end - begin))
    g, limit = g_statistic(shares, BINS), chi_square_limit(BINS - 1, FALSE_ALARM)
    if not g <= limit:
        raise Caught(
            f"{len(shares)} tokens drawn with top_p {top_p:g} do not follow the reference: G {g:.4g}, bound {limit:.4g}"
        )
    return g
