"""Gates of the KV cache: what a forward writes into pages, and what it may not write, read or remember."""

from __future__ import annotations

from typing import Any

import numpy as np

from tideforge.engine.gates.caught import Caught, require_right
from tideforge.engine.gates.probe import POISON, Probe, Recorder, drain
from tideforge.engine.weights import to_float32

DRAWS = 3  # of prompts, until a request was preempted


def canary_pages(probe: Probe) -> dict[str, Any]:
    """Poison in every page; each step may change nothing but its own write slots, and poison must not reach the answer."""
    probe.arena.fill(POISON)
    recorder = Recorder(probe.worker, probe.arena, guard=True)
    prompts = dict(zip("abc", probe.spans([9, 17, 30]), strict=True))
    chains = drain(probe.core(recorder), [probe.request(name, prompt, 3) for name, prompt in prompts.items()], 3)
    if recorder.violations:
        raise Caught("; ".join(recorder.violations[:3]))
    return {"worst_gap": require_right(probe, chains, prompts), "bound": probe.bounds.logit_gap}


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
    gap = require_right(probe, chains, prompts | again)
    return {"worst_gap": gap, "bound": probe.bounds.logit_gap, "preemptions": core.scheduler.num_preemptions}


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
