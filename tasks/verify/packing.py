"""Gate: a worker holds no more than its forward declares (packing.json) beyond what the raw forward's worker holds.

Memory that weights in another layout take is memory that the KV cache would have. It is compared with the raw forward, not with the
incumbent, so that undeclared memory cannot grow from night to night by what the slack lets pass; both have run the same largest steps
just before. What the candidate's worker keeps shows in the one that went through all gates and timed blocks, so packing late helps nobody.
"""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path
from typing import Any

from tideforge.data.workload import RequestShape
from tideforge.engine import measure, nvml, procfs
from tideforge.engine.conduct import GROWN_DEVICE_BYTES
from tideforge.engine.config import Limits
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import KNOBS, Forward
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.held import Held, file_of, held
from tideforge.engine.model_config import model_for
from tideforge.engine.service_config import new_core
from tideforge.tasks.verify.trialled import Trialled

FILE = Path(__file__).parents[2] / "data" / "packing.json"  # slack.py writes it
NOTABLE = 0.1  # of the weights' bytes: a person has to know that so much is kept
BLIND = 0.2  # of them: a person has to know that so much would not be seen
MIB = 1 << 20
TOKENS = 4  # that each of the largest steps' requests emits


def packing(trialled: Trialled) -> dict[str, Any]:
    """Where NVML shows no processes it ends the candidate's worker: what a GPU has less in use then is what it held."""
    declared, slack = trialled.candidate.packing, slack_bytes(trialled.settings.device)
    measured, raw = beyond_raw(trialled)
    weights, layout = trialled.lab.weights_bytes, trialled.lab.layout
    if measured > declared + slack:
        raise Caught(
            f"the worker holds {_mib(measured)} more than the raw forward's, which holds {_mib(raw)}; declared are "
            f"{_mib(declared)}, and {_mib(slack)} are let pass"
        )
    needed, room = weights + layout.bytes + raw + max(0, measured), room_bytes(trialled.settings.device)
    if needed > room:
        raise Caught(f"weights, pages, a worker and its packing take {_mib(needed)}; the device has {_mib(room)}")
    share = declared / weights
    figures: dict[str, Any] = {
        "declared_bytes": declared, "measured_bytes": measured,
        "pages": math.ceil(declared / (layout.pages_bytes / layout.num_blocks)), "share": share,
        "raw_bytes": raw, "slack_bytes": slack,
    }  # fmt: skip
    if share > NOTABLE:
        figures["flag"] = (
            f"{_mib(declared)} kept beside the weights, {share:.0%} of their bytes: {figures['pages']} pages less for the KV cache"
        )
    if slack > BLIND * weights:
        figures["blind"] = f"undeclared copies below {_mib(slack)}, {slack / weights:.0%} of the weights' bytes"
    return figures


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"


def slack_bytes(device: str) -> int:
    """By which workers of one forward may differ. On a GPU that is not measured: as much as a trial lets one grow."""
    measured = json.loads(FILE.read_text())["slack_bytes"]
    return int(measured["cpu"] if device == "cpu" else measured.get("gpu", GROWN_DEVICE_BYTES))


def room_bytes(device: str) -> int:
    if device == "cpu":
        return procfs.total_bytes()
    found = nvml.totals()
    if found is None:
        raise Unverifiable("NVML does not say how much memory the GPU has")
    return found.smallest


def beyond_raw(trialled: Trialled) -> tuple[int, int]:
    """Bytes: what the candidate's worker holds more than the raw forward's, and what that one holds."""
    knobs = {KNOBS: trialled.incumbent.files[KNOBS]} if KNOBS in trialled.incumbent.files else {}
    source = Forward.load(model_for(trialled.lab.config.architecture))
    raw = Forward({**source.files, **knobs})
    with trialled.fresh(raw) as probe:
        assert isinstance(probe.worker, RemoteExecutor)
        _exercise(trialled, raw.id, probe.worker)
        _exercise(trialled, trialled.candidate.id, trialled.b)
        if trialled.settings.device == "cpu":
            return _on_host(trialled, probe.worker)
        theirs = _on_gpu(trialled, probe.worker)
    ours = _on_gpu(trialled, trialled.b)
    return ours - theirs, theirs


def _on_host(trialled: Trialled, raw: RemoteExecutor) -> tuple[int, int]:
    ours, theirs, alone = _held(trialled.b), _held(raw), held([raw.pid])
    if theirs is None or alone is None:
        raise Unverifiable("the kernel does not show what a worker holds")
    if ours is None:
        raise Caught("the worker does not let itself be looked at")
    given = {file_of(trialled.arena.worker_fd): trialled.lab.layout.bytes + procfs.PAGE}
    return ours.beyond(theirs, given), alone.own


def _held(worker: RemoteExecutor) -> Held | None:
    """With what it started; the first process of its namespace is alike in all."""
    pid = worker.pid
    return held([pid, *(one for one in procfs.below(worker.ward.warden_pid) if one != pid)])


def _on_gpu(trialled: Trialled, worker: RemoteExecutor) -> int:
    found = nvml.device_bytes(worker.pid)
    if found is not None:
        return found
    before = nvml.totals()
    if before is None:
        raise Unverifiable("NVML does not say what is in use")
    trialled.end(worker)
    after = nvml.totals()
    return before.used - after.used if after else 0


def largest(limits: Limits, num_blocks: int, block_size: int, text: int, context: int) -> list[RequestShape]:
    """As many requests as a step takes, which fill its tokens, and one as long as the traffic's longest."""
    pages = (num_blocks - 1) * block_size
    most = min(limits.max_model_len, pages, text) - TOKENS
    each = min(most, limits.max_num_batched_tokens // limits.max_num_seqs, pages // limits.max_num_seqs - TOKENS)
    alone = max(1, min(most, max(context, limits.max_num_batched_tokens)))
    return [RequestShape(alone, TOKENS), *[RequestShape(max(1, each), TOKENS)] * limits.max_num_seqs]


def _exercise(trialled: Trialled, forward: str, worker: RemoteExecutor) -> None:
    """The largest steps that either will ever run: allocators keep what those needed."""
    settings, corpus = trialled.settings, trialled.corpus
    shapes = largest(
        settings.limits, settings.num_blocks, settings.block_size, len(corpus) - 1, trialled.workload.context_p99
    )
    prompts = measure.draw_prompts(shapes, corpus, secrets.randbits(64))
    for at_once, part in ((1, slice(0, 1)), (settings.limits.max_num_seqs, slice(1, None))):
        side = measure.Side.of(forward, new_core(settings), worker)
        measure.run_block(side.core, forward, shapes[part], prompts[part], at_once)
