"""Gate: a worker holds no more than its forward declares (packing.json) beyond what the raw forward's worker holds.

Memory that weights in another layout take is memory that the KV cache would have. Both workers are fresh and have run the same few
steps: what libraries keep for each size of a step (oneDNN hundreds of KiB) would hide a copy of a small model. It is compared with
the raw forward, not with the incumbent, so that undeclared memory cannot grow from night to night by what the slack lets pass. That
it is not packed later shows in the worker that went through all gates and timed blocks: it is looked at after each, with a wider slack.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from pathlib import Path
from typing import Any

from tideforge.data.workload import RequestShape
from tideforge.engine import measure, nvml, procfs
from tideforge.engine.conduct import GROWN_DEVICE_BYTES
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import KNOBS, Forward
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.held import File, Held, file_of, of_worker
from tideforge.engine.memory import Arena
from tideforge.engine.model_config import model_for
from tideforge.engine.service_config import new_core
from tideforge.tasks.verify.trialled import Trialled

FILE = Path(__file__).parents[2] / "data" / "packing.json"  # slack.py writes it
NOTABLE = 0.1  # of the weights' bytes: a person has to know that so much is kept
BLIND = 0.2  # of them: a person has to know that so much would not be seen
MIB = 1 << 20
TOKENS = 64  # that each request of the steps before it emits


@dataclasses.dataclass(frozen=True)
class Slack:
    """Bytes by which workers of forwards that keep nothing differ: fresh ones, and one that has lived through gates from a fresh one."""

    fresh: int
    lived: int

    @classmethod
    def of(cls, device: str) -> Slack:
        """On a GPU it is not measured yet: as much as a trial lets one grow."""
        found = json.loads(FILE.read_text())["slack_bytes"].get("cpu" if device == "cpu" else "gpu")
        return cls(**found) if found else cls(GROWN_DEVICE_BYTES, GROWN_DEVICE_BYTES)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Bytes that the candidate's workers hold more than the raw forward's, the fresh one and at most the one that lived (0: not
    looked at); `raw`: what that one holds."""

    fresh: int
    lived: int
    raw: int


def packing(trialled: Trialled) -> dict[str, Any]:
    declared, slack, kept = trialled.candidate.packing, Slack.of(trialled.settings.device), beyond_raw(trialled)
    weights, layout = trialled.lab.weights_bytes, trialled.lab.layout
    for which, measured, more in (("a fresh", kept.fresh, slack.fresh), ("the", kept.lived, slack.lived)):
        if measured > declared + more:
            raise Caught(
                f"{which} worker holds {_mib(measured)} more than the raw forward's, which holds {_mib(kept.raw)}; declared are "
                f"{_mib(declared)}, and {_mib(more)} are let pass"
            )
    needed, room = weights + layout.bytes + kept.raw + max(0, kept.fresh), room_bytes(trialled.settings.device)
    if needed > room:
        raise Caught(f"weights, pages, a worker and its packing take {_mib(needed)}; the device has {_mib(room)}")
    share = declared / weights
    figures: dict[str, Any] = {
        "declared_bytes": declared, "measured_bytes": kept.fresh,
        "pages": math.ceil(declared / (layout.pages_bytes / layout.num_blocks)), "share": share,
        "lived_bytes": kept.lived, "raw_bytes": kept.raw, "slack_bytes": slack.fresh, "lived_slack_bytes": slack.lived,
    }  # fmt: skip
    if share > NOTABLE:
        figures["flag"] = (
            f"{_mib(declared)} kept beside the weights, {share:.0%} of their bytes: {figures['pages']} pages less for the KV cache"
        )
    if slack.fresh > BLIND * weights:
        figures["blind"] = (
            f"undeclared copies below {_mib(slack.fresh)}, {slack.fresh / weights:.0%} of the weights' bytes"
        )
    return figures


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"


def room_bytes(device: str) -> int:
    if device == "cpu":
        return procfs.total_bytes()
    found = nvml.totals()
    if found is None:
        raise Unverifiable("NVML does not say how much memory the GPU has")
    return found.smallest


def beyond_raw(trialled: Trialled) -> Kept:
    knobs = {KNOBS: trialled.incumbent.files[KNOBS]} if KNOBS in trialled.incumbent.files else {}
    source = Forward.load(model_for(trialled.lab.config.architecture))
    theirs, _, alone = _fresh(trialled, Forward({**source.files, **knobs}))
    if theirs is None:
        raise Unverifiable("the kernel does not show what a worker holds")
    ours, given, _ = _fresh(trialled, trialled.candidate)
    trialled.look()
    own = _given(trialled, trialled.arena)
    lived = [_seen(look).beyond(theirs, own) for look in trialled.looks]
    return Kept(_seen(ours).beyond(theirs, given), max(lived, default=0), alone)


def _seen(look: Held | None) -> Held:
    if look is None:
        raise Caught("the worker does not let itself be looked at")
    return look


def _given(trialled: Trialled, arena: Arena) -> dict[File, int]:
    return {file_of(arena.worker_fd): trialled.lab.layout.bytes + procfs.PAGE}


def _fresh(trialled: Trialled, forward: Forward) -> tuple[Held | None, dict[File, int], int]:
    """What a fresh worker of it holds after some steps, what it was given, and what its process alone holds. On a GPU where NVML
    shows no processes that is what its end gives back."""
    with trialled.fresh(forward) as probe:
        worker, device = probe.worker, trialled.settings.device
        assert isinstance(worker, RemoteExecutor)
        _exercise(trialled, forward.id, worker)
        found = of_worker(worker.ward, device)
        if found is None and device != "cpu":
            found = Held(_returned(trialled, worker), {})
        alone = worker.ward.anonymous_bytes() if device == "cpu" else found.own if found else 0
        return found, _given(trialled, probe.arena), alone


def _returned(trialled: Trialled, worker: RemoteExecutor) -> int:
    """Bytes of the GPUs that a worker's end gives back."""
    before = nvml.totals()
    if before is None:
        raise Unverifiable("NVML does not say what is in use")
    trialled.lab.release(worker)
    after = nvml.totals()
    return before.used - after.used if after else 0


def _exercise(trialled: Trialled, forward: str, worker: RemoteExecutor) -> None:
    """One prefill of as many tokens as a step takes, and decodes of as many requests: what is packed at a first call is packed then."""
    limits, corpus = trialled.settings.limits, trialled.corpus
    room = (trialled.settings.num_blocks - 1) * trialled.settings.block_size // limits.max_num_seqs
    longest = min(limits.max_model_len, room, len(corpus) - 1) - TOKENS
    each = max(1, min(longest, limits.max_num_batched_tokens // limits.max_num_seqs))
    shapes = [RequestShape(each, TOKENS)] * limits.max_num_seqs
    prompts = measure.draw_prompts(shapes, corpus, secrets.randbits(64))
    side = measure.Side.of(forward, new_core(trialled.settings), worker)
    measure.run_block(side.core, forward, shapes, prompts, limits.max_num_seqs)
