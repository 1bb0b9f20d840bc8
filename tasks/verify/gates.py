"""The gates. Each takes a Probe and returns figures, or raises Caught with the evidence: request, token, layer, expected, got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tideforge.engine import check, compare
from tideforge.engine.measure import Answer
from tideforge.engine.weights import to_float32
from tideforge.errors import TideforgeError
from tideforge.tasks.verify.probe import POISON, Probe, Recorder, drain

Gate = Callable[[Probe], dict[str, Any]]
LONGEST = 1024  # tokens of context that a gate can afford on a CPU
DRAWS = 3  # of prompts, until a request was preempted


class Caught(TideforgeError):
    """A gate saw a fault; the message is its evidence."""


def _require_right(probe: Probe, chains: dict[str, list[int]], prompts: dict[str, tuple[int, ...]]) -> float:
    """Every emitted token within the derived bound of the reference's maximum; the worst gap in logits."""
    names = list(chains)
    answers = [Answer(prompts[name], tuple(chains[name]), ()) for name in names]
    found = check.worst(probe.reference, answers, probe.layers)
    if found.gap > probe.bounds.logit_gap:
        raise Caught(
            f"request {names[found.answer]}, token {found.position}: emitted {found.token}, the reference prefers "
            f"{found.expected} by {found.gap:.4g} logits; the bound is {probe.bounds.logit_gap:.4g}"
        )
    return found.gap


def interleaved_against_serial(probe: Probe) -> dict[str, Any]:
    """Requests answered side by side equal those answered one by one: neighbours in the batch do not matter."""
    count = min(6, probe.limits.max_num_seqs)
    prompts = dict(zip(map(str, range(count)), probe.spans([7 + 5 * i for i in range(count)]), strict=True))
    together, alone = Recorder(probe.worker, probe.arena), Recorder(probe.worker, probe.arena)
    chains = {}
    for recorder, at_once in ((together, count), (alone, 1)):
        requests = [probe.request(name, prompt, 6) for name, prompt in prompts.items()]
        chains[at_once] = drain(probe.core(recorder), requests, at_once)
        gap = _require_right(probe, chains[at_once], prompts)
    worst, bound = 0.0, 2 * probe.bounds.logit  # both runs may be off, in opposite directions
    for name in prompts:
        for step, (a, b) in enumerate(zip(together.rows[name], alone.rows[name], strict=True)):
            difference = float(np.abs(a.logits - b.logits).max())
            worst = max(worst, difference)
            if not difference <= bound:
                raise Caught(
                    f"request {name}, token {step}: logits differ by {difference:.4g} beside neighbours; bound {bound:.4g}"
                )
            if chains[count][name][step] != chains[1][name][step]:
                break  # a tie within the bound went the other way: from here on the prefixes differ
    return {"max_logit_difference": worst, "worst_gap": gap, "bound": bound}


def canary_pages(probe: Probe) -> dict[str, Any]:
    """Poison in every page; each step may change nothing but its own write slots, and poison must not reach the answer."""
    probe.arena.fill(POISON)
    recorder = Recorder(probe.worker, probe.arena, guard=True)
    prompts = dict(zip("abc", probe.spans([9, 17, 30]), strict=True))
    chains = drain(probe.core(recorder), [probe.request(name, prompt, 3) for name, prompt in prompts.items()], 3)
    if recorder.violations:
        raise Caught("; ".join(recorder.violations[:3]))
    return {"worst_gap": _require_right(probe, chains, prompts), "bound": probe.bounds.logit_gap}


def block_reuse(probe: Probe) -> dict[str, Any]:
    """Blocks freed, given out again, shared as prefixes, evicted, and taken back in mid-flight: stale K and V never show.

    The pool is so small that two requests fill it and each needs one block more to finish: one of them is preempted.
    Where none was, other prompts are drawn; what was never preempted has not passed.
    """
    for _ in range(DRAWS):
        figures = _reuse(probe)
        if figures["preemptions"]:
            return figures
    raise Caught(
        f"nothing was preempted in {DRAWS} draws of prompts, so blocks taken back in mid-flight went unchecked"
    )


def _reuse(probe: Probe) -> dict[str, Any]:
    size = probe.arena.layout.block_size
    shared, *tails = probe.spans([2 * size, *[size - 2] * 2, *[3 * size - 2] * 3])
    prompts = {f"r{i}": shared + tail if i < 2 else tail for i, tail in enumerate(tails)}
    recorder = Recorder(probe.worker, probe.arena)
    core = probe.core(recorder, num_blocks=8, prefix_cache=True)
    core.add(probe.request("aborted", probe.spans([2 * size])[0], 8))
    core.step()
    core.abort("aborted")
    order = ["r2", "r3", "r4", "r0", "r1"]  # the first two fill the pool, the last two share a prefix
    chains = drain(core, [probe.request(name, prompts[name], 4) for name in order], len(order))
    again = {f"{name}-again": prompt for name, prompt in prompts.items()}
    chains |= drain(core, [probe.request(name, prompt, 4) for name, prompt in again.items()], 2)
    gap = _require_right(probe, chains, prompts | again)
    return {"worst_gap": gap, "bound": probe.bounds.logit_gap, "preemptions": core.scheduler.num_preemptions}


def long_context(probe: Probe) -> dict[str, Any]:
    """Answers after a prompt as long as pages, limits and text allow (at most LONGEST), computed in chunks."""
    layout = probe.arena.layout
    room = min((layout.num_blocks - 1) * layout.block_size, probe.limits.max_model_len, len(probe.text) // 2, LONGEST)
    prompts = dict(zip(("half", "long"), probe.spans([room // 2, room - 8]), strict=True))
    chains: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        recorder = Recorder(probe.worker, probe.arena)
        chains |= drain(probe.core(recorder), [probe.request(name, prompt, 6)], 1)
    return {"worst_gap": _require_right(probe, chains, prompts), "context": room, "bound": probe.bounds.logit_gap}


def written_kv(probe: Probe) -> dict[str, Any]:
    """K and V of every layer as the authority reads them from the pages, against the reference's."""
    prompt = probe.spans([40])[0]
    recorder = Recorder(probe.worker, probe.arena)
    chain = drain(probe.core(recorder), [probe.request("kv", prompt, 4)], 1)["kv"]
    row = recorder.rows["kv"][-1]
    tokens = (prompt + tuple(chain))[: row.context]
    keys, values = probe.reference.kv(tokens, probe.layers)
    slots = np.asarray(row.blocks)[np.arange(row.context) // probe.arena.layout.block_size]
    offsets = np.arange(row.context) % probe.arena.layout.block_size
    # The noise of these very tokens: the first few of a sequence can carry activations a hundred times the usual.
    bounds = probe.reference.bounds(probe.arena.layout.dtype, tokens, probe.layers)
    worst = 0.0
    for layer in probe.layers:
        for name, expected, is_value, limits in (
            ("keys", keys[layer], False, np.maximum(bounds.key, probe.bounds.key)),
            ("values", values[layer], True, np.maximum(bounds.value, probe.bounds.value)),
        ):
            got = float32(probe.arena.plane(layer, is_value)[slots, offsets], probe.arena.layout.dtype)
            errors = np.abs(got - expected)
            worst = max(worst, float(errors.max()) / limits[layer])
            if not errors.max() <= limits[layer]:
                token, head, _ = np.unravel_index(int(np.nan_to_num(errors, nan=np.inf).argmax()), errors.shape)
                raise Caught(
                    f"layer {layer} {name}, token {token}, head {head}: off by {errors.max():.4g}; bound {limits[layer]:.4g}"
                )
    return {"worst_share_of_bound": worst, "layers": len(probe.layers), "tokens": row.context}


def float32(plane: np.ndarray, dtype: str) -> np.ndarray:
    """Pages as the authority sees them (16-bit floats as uint16) in fp32."""
    if dtype == "bfloat16":
        return to_float32("BF16", plane)
    return plane.view(np.float16).astype(np.float32) if dtype == "float16" else plane


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


def determinism(probe: Probe) -> dict[str, Any]:
    """The same requests in the same batch twice: the same tokens and bit-identical logits."""
    prompts = dict(zip("ab", probe.spans([11, 23]), strict=True))
    runs = []
    for _ in range(2):
        recorder = Recorder(probe.worker, probe.arena)
        drain(probe.core(recorder), [probe.request(name, prompt, 5) for name, prompt in prompts.items()], 2)
        runs.append(recorder.rows)
    for name in prompts:
        for step, (a, b) in enumerate(zip(runs[0][name], runs[1][name], strict=True)):
            if not np.array_equal(a.logits, b.logits):
                difference = float(np.abs(a.logits - b.logits).max())
                raise Caught(f"request {name}, token {step}: two runs differ by {difference:.4g} logits")
    return {"tokens": sum(len(rows) for rows in runs[0].values())}


GATES: dict[str, Gate] = {
    "interleaved_against_serial": interleaved_against_serial,
    "canary_pages": canary_pages,
    "block_reuse": block_reuse,
    "long_context": long_context,
    "written_kv": written_kv,
    "quality": quality,
    "determinism": determinism,
}
