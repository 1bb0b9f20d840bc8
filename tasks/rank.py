"""Node `rank`: every layout of the endpoint's model on its hardware, priced for the night's profile."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tideforge.costmodel import rank as ranking
from tideforge.costmodel.predict import Traffic
from tideforge.costmodel.question import question
from tideforge.costmodel.rank import Question, Ranking
from tideforge.data.files import sha256_bytes
from tideforge.data.profile_records import Profile, bin_edges
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Manifest, Run

PROMPT_GROUPS = 6


def traffic_of(profile: Profile) -> Traffic:
    """Means, prompts in groups and the mean context of a decoded token, from the joint distribution; P99 of the context as the
    longest request that must fit. Idle hours do not pull the users below 1."""
    lengths = [(requests, middle(prompt), middle(output)) for prompt, output, requests in profile.joint]
    prompts = scaled([(n, prompt) for n, prompt, _ in lengths], profile.prompt.mean)
    outputs = scaled([(n, output) for n, _, output in lengths], profile.output.mean)
    decoded = [(n * output, prompt + output / 2) for (n, prompt), (_, output) in zip(prompts, outputs, strict=True)]
    return Traffic(
        prompt_tokens=max(profile.prompt.mean, 1.0),
        output_tokens=max(profile.output.mean, 1.0),
        users=max(profile.concurrency.mean, 1.0),
        longest_tokens=float(profile.context.quantiles.get("p99", profile.context.most)),
        source=f"profile {profile.sha256[:12]} of {profile.requests} requests",
        prompts=grouped(prompts),
        decode_context=sum(n * context for n, context in decoded) / sum(n for n, _ in decoded),
    )


def middle(index: int) -> float:
    """Of a bin of the joint histogram, in logarithms of lengths."""
    least, above = bin_edges(index)
    return math.sqrt(least * max(least, above - 1))


def scaled(lengths: Sequence[tuple[float, float]], mean: float) -> list[tuple[float, float]]:
    """(requests, length), so that their mean is the one that was counted."""
    factor = mean * sum(n for n, _ in lengths) / sum(n * length for n, length in lengths)
    return [(n, length * factor) for n, length in lengths]


def grouped(prompts: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(share, mean tokens) of PROMPT_GROUPS groups in order of length, each with as many tokens in it as the others or a bin more:
    arithmetic grows faster than a prompt, so the long ones are told apart best."""
    whole, requests = sum(n * tokens for n, tokens in prompts), sum(n for n, _ in prompts)
    groups: dict[int, tuple[float, float]] = {}
    passed = 0.0
    for n, tokens in sorted(prompts, key=lambda one: one[1]):
        place = min(int(PROMPT_GROUPS * passed / whole), PROMPT_GROUPS - 1)
        count, total = groups.get(place, (0.0, 0.0))
        groups[place] = (count + n, total + n * tokens)
        passed += n * tokens
    return tuple((count / requests, max(total / count, 1.0)) for count, total in groups.values())


def endpoint_question(endpoint: Endpoint, traffic: Traffic) -> Question:
    """The endpoint's own objective and limits. Raises UserError naming the field's content that is at fault."""
    objective = endpoint.objective
    return question(
        endpoint.launch,
        str(endpoint.model),
        endpoint.hardware.name,
        endpoint.hardware.gpus,
        endpoint.hardware.nodes,
        traffic,
        maximize=objective.maximize,
        ttft_limit_ms=objective.ttft_p90_ms,
        tpot_limit_ms=objective.tpot_p90_ms,
        dtype=endpoint.precision,
    )


def rank(run: Run, endpoint: Endpoint) -> Manifest:
    """Output: layouts (JSON of costmodel.rank.to_dict). A night changes the forward alone: `layout` says so, and
    `recommended` names the layout that the model prefers, for a person to act on."""
    started = time.time()
    profiled = run.need("profile")
    asked = endpoint_question(endpoint, traffic_of(Profile.read(run.path(profiled, "profile"))))
    inputs = {"profile": profiled.outputs["profile"].sha256, "question": sha256_bytes(repr(asked).encode())}
    if manifest := run.done("rank", inputs):
        return manifest
    answer = ranking.rank(asked)
    outputs = {"layouts": run.write_json("layouts", ranking.to_dict(answer))}
    return run.finish("rank", inputs, outputs, _figures(answer), started)


def _figures(answer: Ranking) -> dict[str, object]:
    best = answer.ranked[0] if answer.ranked else None
    return {
        "layout": "unchanged",
        "recommended": str(best.layout) if best else None,
        "predicted_output_tps": best.prediction.output_tokens_per_s if best else None,
        "current_is_tied": bool(answer.current and answer.current.tied),
        "legal": len(answer.ranked),
        "rejected": len(answer.rejected),
    }
