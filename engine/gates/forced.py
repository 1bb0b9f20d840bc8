"""Teacher forcing: the candidate's logits, and the reference's, on given text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tideforge.engine.gates.probe import Probe, Recorder, drain

ORDERS = 2  # of the reference's own sums, on the very tokens that a candidate is compared on


def candidate_logits(probe: Probe, spans: Sequence[Sequence[int]], start: int) -> np.ndarray:
    """Logits that the tokens of each span from `start` on follow, [sum of len - start, V]; as many in flight as the batch holds."""
    named = {str(index): tuple(span) for index, span in enumerate(spans)}
    recorder = Recorder(probe.worker, probe.arena, forced={name: span[start:] for name, span in named.items()})
    requests = [probe.request(name, span[:start], len(span) - start) for name, span in named.items()]
    drain(probe.core(recorder), requests, min(len(spans), probe.limits.max_num_seqs))
    return np.stack([row.logits for name in named for row in recorder.rows[name]])


def order_logits(probe: Probe, spans: Sequence[Sequence[int]], start: int) -> list[np.ndarray]:
    """The reference's on the same tokens, in other orders of its sums, at the endpoint's precision."""
    seeds = [probe.secret() for _ in range(ORDERS)]
    dtype = probe.arena.layout.dtype
    return [probe.reference.after(spans, start, probe.layers, f"order:{seed}", dtype) for seed in seeds]
