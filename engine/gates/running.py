"""Gates of how a forward is run: beside others or alone, again, in other batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tideforge.engine.gates.caught import Caught, require_right
from tideforge.engine.gates.probe import Probe, Recorder, drain


def interleaved_against_serial(probe: Probe) -> dict[str, Any]:
    """Requests answered side by side equal those answered one by one: neighbours in the batch do not matter."""
    count = min(6, probe.limits.max_num_seqs)
    prompts = dict(zip(map(str, range(count)), probe.spans([7 + 5 * i for i in range(count)]), strict=True))
    together, alone = Recorder(probe.worker, probe.arena), Recorder(probe.worker, probe.arena)
    chains = {}
    for recorder, at_once in ((together, count), (alone, 1)):
        requests = [probe.request(name, prompt, 6) for name, prompt in prompts.items()]
        chains[at_once] = drain(probe.core(recorder), requests, at_once)
        gap = require_right(probe, chains[at_once], prompts)
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
