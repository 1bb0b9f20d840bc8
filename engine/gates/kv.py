"""Gates of the KV cache: what a forward writes into pages, and what it may not write, read or remember."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tideforge.engine.gates.caught import Caught, Unverifiable, require_right
from tideforge.engine.gates.probe import POISON, Probe, Recorder, drain
from tideforge.engine.gates.replay import (
    Moment,
    Place,
    Until,
    Watch,
    float32,
    last_decode,
    places,
    read_slots,
    replay,
    slots_of,
    some,
)
from tideforge.engine.gates.shadow import Shadow
from tideforge.engine.scheduler import Step
from tideforge.errors import CandidateError

POISONS = range(0x3A, 0x46)  # every float type then reads something finite: 7e-4 to about 3e3
PAUSE_S = (0.02, 0.15)  # while nothing is asked
DRAWS = 3  # of prompts, until a request was preempted


def canary_pages(probe: Probe) -> dict[str, Any]:
    """Poison in every page, then a replay as it is timed: a step may change nothing but its own write slots, in free pages or others',
    and poison must not reach an answer."""
    rng = np.random.default_rng(probe.secret())
    probe.arena.fill(int(rng.choice(POISONS)))
    shadow, until = Shadow(probe), Until(rng)

    def after(step: Step, runs: list[Sequence[int]]) -> None:
        shadow.take(step)
        shadow.require("was written by a step that does not have it")
        until.after(step, runs)

    found = replay(probe, Watch(probe.worker, after=after), until.is_now)
    gap = require_right(probe, *some(rng, found))
    return {"worst_gap": gap, "bound": probe.bounds.logit_gap, "steps": until.steps, "slots": shadow.slots}


def nan_pages(probe: Probe) -> dict[str, Any]:
    """NaN in all free pages, and before each step in the dummy page, to which padded rows belong: it must not reach an answer."""
    rng = np.random.default_rng(probe.secret())
    probe.arena.fill(0xFF)
    until = Until(rng)
    try:
        found = replay(probe, Watch(probe.worker, lambda step: _poison_dummy(probe), until.after), until.is_now)
    except CandidateError as error:
        if error.outcome != "not_finite":
            raise
        raise Caught(f"NaN in pages that no row may read reached an answer: {error.message}") from error
    finally:
        probe.arena.fill(POISON)
    gap = require_right(probe, *some(rng, found))
    return {"worst_gap": gap, "bound": probe.bounds.logit_gap, "steps": until.steps}


def _poison_dummy(probe: Probe) -> None:
    """NaN in block 0, of every layer."""
    for layer in probe.layers:
        for values in (False, True):
            first = probe.arena.plane(layer, values)[0]
            bits = np.full(first.shape, -1, f"i{first.itemsize}").view(first.dtype)
            probe.arena.store(layer, values, np.arange(len(first)), bits)


def block_reuse(probe: Probe) -> dict[str, Any]:
    """Blocks freed, given out again, shared as prefixes, evicted, and taken back in mid-flight: stale K and V never show.

    The pool is so small that two requests fill it and each needs one block more to finish: one of them is preempted.
    Where none was, other prompts are drawn; where none can be, at one sequence at a time say, the gate cannot tell.
    """
    for _ in range(DRAWS):
        figures = _reuse(probe)
        if figures["preemptions"]:
            return figures
    raise Unverifiable(
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
    """K and V of every layer as the authority reads them from the pages, against the reference's: of a request by itself, and of one
    in a replay as it is timed."""
    prompt = probe.spans([40])[0]
    recorder = Recorder(probe.worker, probe.arena)
    chain = drain(probe.core(recorder), [probe.request("kv", prompt, 4)], 1)["kv"]
    row = recorder.rows["kv"][-1]
    alone = require_written(probe, "kv", (*prompt, *chain)[: row.context], row.blocks)
    rng = np.random.default_rng(probe.secret())
    until, last = Until(rng), dict[str, Place]()

    def after(step: Step, runs: list[Sequence[int]]) -> None:
        until.after(step, runs)
        last.clear()  # who ended before this step has lost its blocks, perhaps to somebody else
        for place in places(step):
            emitted = [int(run[place.logits_row]) for run in runs[:-1]]
            last[place.request] = dataclasses.replace(place, inputs=(*place.inputs, *emitted))

    found = replay(probe, Watch(probe.worker, after=after), until.is_now)
    name = str(rng.choice(sorted(last)))
    tokens = (*found.prompts[name], *found.chains[name])[: last[name].context]
    beside = require_written(probe, name, tokens, last[name].blocks)
    return {
        "worst_share_of_bound": max(alone, beside), "layers": len(probe.layers), "tokens": row.context + len(tokens),
    }  # fmt: skip


def require_written(probe: Probe, request: str, tokens: tuple[int, ...], blocks: Sequence[int]) -> float:
    """The worst share of its bound that an element takes."""
    slots, dtype = slots_of(probe.arena, blocks, len(tokens)), probe.arena.layout.dtype
    expected = probe.reference.kv(tokens, probe.layers)
    # The noise of these very tokens: the first few of a sequence can carry activations a hundred times the usual.
    own = probe.reference.bounds(dtype, tokens, probe.layers)
    limits = (np.maximum(own.key, probe.bounds.key), np.maximum(own.value, probe.bounds.value))
    found = read_slots(probe.arena, probe.layers, slots)
    worst = 0.0
    for layer, side in itertools.product(
        range(len(probe.layers)), range(2)
    ):  # what goes wrong in one layer goes on in the next
        got = float32(found[side][layer], dtype)
        error = np.nan_to_num(np.abs(got - expected[side][layer]), nan=np.inf)
        limit = limits[side][layer]
        worst = max(worst, float(error.max() / limit))
        if not error.max() <= limit:
            at = token, head, element = np.unravel_index(int(error.argmax()), error.shape)
            raise Caught(
                f"request {request}, layer {layer} {'values' if side else 'keys'}, token {token}, head {head}: off by "
                f"{error.max():.4g}; bound {limit:.4g}; element {element} in slot {slots[token]} is "
                f"{got[at]:.5g}, expected {expected[side][layer][at]:.5g}"
            )
    return worst


def held_outputs(probe: Probe) -> dict[str, Any]:
    """Once a step's tokens are there its logits and all pages stay as they are while nothing is asked, and the pages of what has
    finished also through the steps that follow."""
    rng = np.random.default_rng(probe.secret())
    shadow, moment, until = Shadow(probe), Moment(rng, last_decode(probe), mean=1.0), Until(rng, mean=6.0)
    held: list[Step] = []

    def after(step: Step, runs: list[Sequence[int]]) -> None:
        until.after(step, runs)
        shadow.take(step)
        if moment.has_come(step) or until.is_now():
            held.append(step)
            _require_held(probe, shadow, step, float(rng.uniform(*PAUSE_S)))

    found = replay(probe, Watch(probe.worker, after=after), until.is_now)
    time.sleep(PAUSE_S[1])
    shadow.require("changed after the step that wrote it was answered")
    gap = require_right(probe, *some(rng, found))
    return {"worst_gap": gap, "bound": probe.bounds.logit_gap, "held": len(held), "steps": until.steps}


def _require_held(probe: Probe, shadow: Shadow, step: Step, pause_s: float) -> None:
    logits = probe.arena.logits(len(step.request_ids)).copy()
    time.sleep(pause_s)
    now = probe.arena.logits(len(step.request_ids))
    changed = (logits.view(np.uint32) != now.view(np.uint32)).any(axis=1)
    if changed.any():
        row = int(changed.argmax())
        raise Caught(
            f"request {step.request_ids[row]}: its logits changed after they were answered, while nothing was asked"
        )
    shadow.require("changed after the step that wrote it was answered")
