"""Gates of block tables: where pages lie must not matter, nor how often they change hands."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tideforge.engine.gates.caught import Caught, require_alike, require_right
from tideforge.engine.gates.probe import Probe, Recorder, drain
from tideforge.engine.gates.replay import draw

CYCLES = 200  # requests aborted and admitted again
OUTPUTS = 3


def permuted_tables(probe: Probe) -> dict[str, Any]:
    """The same requests, as a timed block has them, on other physical blocks: the same answers."""
    rng = np.random.default_rng(probe.secret())
    _, prompts = draw(probe)
    named = {str(i): prompt for i, prompt in enumerate(prompts)}
    rows, chains = [], []
    for permuted in (False, True):
        recorder = Recorder(probe.worker, probe.arena)
        core = probe.core(recorder)
        if permuted:
            blocks = core.pool.allocate(core.pool.capacity)
            core.pool.release(rng.permutation(blocks).tolist())
        chains.append(drain(core, [probe.request(name, prompt, OUTPUTS) for name, prompt in named.items()], len(named)))
        rows.append(recorder.rows)
    bound = 2 * probe.bounds.logit  # both may be off, in opposite directions
    worst = require_alike(rows, chains, bound, "on other blocks")
    moved = sum(a.blocks != b.blocks for name in named for a, b in zip(rows[0][name], rows[1][name], strict=False))
    return {"max_logit_difference": worst, "bound": bound, "tables_that_differ": moved}


def abort_cycles(probe: Probe) -> dict[str, Any]:
    """Requests aborted in mid-flight and admitted again, CYCLES times, in a pool that they overfill; then all of them are answered."""
    rng, size = np.random.default_rng(probe.secret()), probe.arena.layout.block_size
    count = min(probe.limits.max_num_seqs, 16)
    shared = probe.spans([size])[0]
    # Of eight one needs a second block to finish, and two share one.
    tails = probe.spans([size - 1 if i % 8 == 1 else int(rng.integers(2, 4)) for i in range(count)])
    prompts = {str(i): shared + tail if i % 4 == 0 else tail for i, tail in enumerate(tails)}
    recorder = Recorder(probe.worker, probe.arena)
    core = probe.core(recorder, num_blocks=max(5, count), prefix_cache=True)
    requests = {name: probe.request(name, prompt, OUTPUTS) for name, prompt in prompts.items()}
    cycles = 0
    for request in requests.values():
        core.add(request)
    while cycles < CYCLES:
        events = core.step()
        finished = {event.request_id for event in events if event.finish}
        aborted = {name for name in requests if name not in finished and rng.random() < 0.9}
        for name in itertools.chain(aborted, finished):
            core.abort(name)
        for name in rng.permutation([*aborted, *finished]).tolist():
            core.add(requests[name])
        cycles += len(aborted)
    for name in requests:
        core.abort(name)
    recorder.rows.clear()
    chains = drain(core, list(requests.values()), len(requests))
    short = [name for name, chain in chains.items() if len(chain) != OUTPUTS]
    if short:
        raise Caught(f"request {short[0]} got {len(chains[short[0]])} of {OUTPUTS} tokens after {cycles} aborts")
    gap = require_right(probe, chains, prompts)
    held = [b for b in range(1, core.pool.num_blocks) if core.pool.references(b)]
    if held:
        raise Caught(f"block {held[0]} is still held after all requests ended")
    return {
        "cycles": cycles,
        "worst_gap": gap,
        "bound": probe.bounds.logit_gap,
        "preemptions": core.scheduler.num_preemptions,
    }
