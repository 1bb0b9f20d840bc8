"""Gates of quality: the answers against the reference's, on real text."""

from __future__ import annotations

from typing import Any

import numpy as np

from tideforge.engine import compare
from tideforge.engine.gates.caught import Caught, require_right
from tideforge.engine.gates.probe import Probe, Recorder, drain

LONGEST = 1024  # tokens of context that a gate can afford on a CPU


def quality(probe: Probe) -> dict[str, Any]:
    """Teacher-forced on real text: KL of the reference to the candidate a token, and its argmax within the derived gap."""
    count, start, length = min(8, probe.limits.max_num_seqs), 16, 40
    spans = dict(zip(map(str, range(count)), probe.spans([length] * count), strict=True))
    recorder = Recorder(probe.worker, probe.arena, forced={name: span[start:] for name, span in spans.items()})
    drain(
        probe.core(recorder), [probe.request(name, span[:start], length - start) for name, span in spans.items()], count
    )
    kl, agreement, violations = [], [], []
    for name, span in spans.items():
        expected = probe.reference.logits(span, range(start - 1, length - 1), probe.layers)
        got = np.stack([row.logits for row in recorder.rows[name]])
        kl.append(compare.kl(expected, got))
        agreement.append(compare.top1_agreement(expected, got))
        violations += [(name, int(row)) for row in compare.top1_violations(expected, got, probe.bounds.logit_gap)]
    flat = np.concatenate(kl)
    if violations:
        raise Caught(
            f"request {violations[0][0]}, token {violations[0][1]}: another token on top; {len(violations)} in all"
        )
    if not flat.max() <= probe.bounds.kl_max:
        raise Caught(f"KL of {flat.max():.4g} nats at token {int(flat.argmax())}; bound {probe.bounds.kl_max:.4g}")
    return {
        "kl_mean": float(flat.mean()), "kl_p99": float(np.quantile(flat, 0.99)), "kl_max": float(flat.max()),
        "kl_bound": probe.bounds.kl_max, "top1_agreement": float(np.mean(agreement)), "tokens": int(flat.size),
    }  # fmt: skip


def long_context(probe: Probe) -> dict[str, Any]:
    """Answers after a prompt as long as pages, limits and text allow (at most LONGEST), computed in chunks."""
    layout = probe.arena.layout
    room = min((layout.num_blocks - 1) * layout.block_size, probe.limits.max_model_len, len(probe.text) // 2, LONGEST)
    prompts = dict(zip(("half", "long"), probe.spans([room // 2, room - 8]), strict=True))
    chains: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        recorder = Recorder(probe.worker, probe.arena)
        chains |= drain(probe.core(recorder), [probe.request(name, prompt, 6)], 1)
    return {"worst_gap": require_right(probe, chains, prompts), "context": room, "bound": probe.bounds.logit_gap}
