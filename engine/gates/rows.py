"""Gates that look at every row: what is wrong once in fifty decodes, in text that repeats itself, or only for requests that look alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tideforge.engine.gates.caught import Caught
from tideforge.engine.gates.kv import require_written
from tideforge.engine.gates.probe import Probe, Recorder, drain
from tideforge.engine.scheduler import Request

MOST = 32  # sequences at once that a CPU affords
ROWS = 400  # decodes: what is wrong in one of 50 is among them but for once in 3,000 times
SPAN = 112  # tokens of a request, prompt and answer
LOOK, LOOKED_AT = 16, 4  # decodes of a first look, and requests


@dataclasses.dataclass(frozen=True)
class Chain:
    """A request whose answer is known beforehand: `tokens` from `start` on."""

    tokens: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Chain:
        return cls(prompt + answer, len(prompt))

    def request(self, probe: Probe, name: str) -> Request:
        return probe.request(name, self.tokens[: self.start], len(self.tokens) - self.start)


def every_row(probe: Probe) -> dict[str, Any]:
    """Hundreds of decodes of real text that is forced on them, in the largest batch, at all contexts, a third of it repeating itself:
    all logits and, of the answer that ended last, all K and V."""
    rng = np.random.default_rng(probe.secret())
    longest, count = min(SPAN, probe.limits.max_model_len, len(probe.text) // 2), min(probe.limits.max_num_seqs, MOST)
    decodes = min(-(-ROWS // count), longest // 2)
    starts = rng.integers(1, longest - decodes + 1, count).tolist()
    spans = probe.spans([start + decodes for start in starts])
    spans = [repeating(span, rng) if i % 3 == 1 else span for i, span in enumerate(spans)]
    chains = {str(i): Chain(span, start) for i, (span, start) in enumerate(zip(spans, starts, strict=True))}
    return _side_by_side(probe, chains)


def first_look(probe: Probe) -> dict[str, Any]:
    """A few decodes side by side: all logits, and K and V of one request. What a search asks of those that it would keep."""
    start = 6 + probe.secret() % 10
    spans = probe.spans([start + LOOK] * min(LOOKED_AT, probe.limits.max_num_seqs))
    chains = {str(i): Chain(span, start) for i, span in enumerate(spans)}
    return _side_by_side(probe, chains)


def _side_by_side(probe: Probe, chains: Mapping[str, Chain]) -> dict[str, Any]:
    """All at once, each with as many tokens to answer: all logits, and K and V of the request that was admitted last."""
    recorder = _forced(probe, chains)
    drain(probe.core(recorder), [chain.request(probe, name) for name, chain in chains.items()], len(chains))
    figures = require_rows(probe, recorder, chains)
    name = list(chains)[-1]  # it ended last: nobody has its blocks yet
    last = recorder.rows[name][-1]
    worst = require_written(probe, name, chains[name].tokens[: last.context], last.blocks)
    return {**figures, "worst_share_of_bound": worst}


def repeating(span: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
    """As long, of its first tokens again and again."""
    period = int(rng.integers(3, 12))
    return (span[:period] * (len(span) // period + 1))[: len(span)]


def alike(probe: Probe) -> dict[str, Any]:
    """Requests of one beginning, as those of a system prompt: equal tokens at equal positions behind equal blocks, and other tokens
    between. Then some from the prefix cache and some of a single token, which begin as decodes where another has just ended."""
    rng = np.random.default_rng(probe.secret())
    size, count = probe.arena.layout.block_size, min(6, probe.limits.max_num_seqs)
    beginning, answer = probe.spans([2 * size, 5])
    tails = [span[:-1] + answer[:1] for span in probe.spans([size] * count)]  # then all say the same
    long = {f"alike-{i}": Chain.of(beginning + tail, answer[1:]) for i, tail in enumerate(tails)}
    short = {}
    for i in range(3 * count):
        [own] = probe.spans([1])
        prompts = (
            beginning + tails[i % count] + own,
            own,
            beginning + own,
        )  # full blocks are cached, one token is left
        prompt = prompts[i % 3]
        short[f"short-{i}"] = Chain.of(prompt, probe.spans([int(rng.integers(2, 7))])[0])
    recorder = _forced(probe, long | short)
    core = probe.core(recorder, prefix_cache=True)
    for chains in (long, short):
        drain(core, [chain.request(probe, name) for name, chain in chains.items()], count)
    return require_rows(probe, recorder, long | short)


def _forced(probe: Probe, chains: Mapping[str, Chain]) -> Recorder:
    return Recorder(probe.worker, probe.arena, {name: chain.tokens[chain.start :] for name, chain in chains.items()})


def require_rows(probe: Probe, recorder: Recorder, chains: Mapping[str, Chain]) -> dict[str, Any]:
    """Logits of each row within the bound of the reference's."""
    expected = probe.reference.after(
        [chain.tokens for chain in chains.values()], [chain.start for chain in chains.values()], probe.layers
    )
    worst, at = 0.0, 0
    for name in chains:
        for token, row in enumerate(recorder.rows[name]):
            errors = np.nan_to_num(np.abs(row.logits - expected[at]), nan=np.inf)
            of, off = int(errors.argmax()), float(errors.max())
            if not off <= probe.bounds.logit:
                raise Caught(
                    f"request {name}, token {token} of {len(recorder.rows[name])}: a logit is off by {off:.4g}; bound "
                    f"{probe.bounds.logit:.4g}; that of token {of} is {row.logits[of]:.5g}, expected {expected[at][of]:.5g}"
                )
            worst, at = max(worst, off), at + 1
    return {"rows": at, "max_logit_difference": worst, "bound": probe.bounds.logit}
