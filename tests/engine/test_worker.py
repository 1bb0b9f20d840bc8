"""Candidates that misbehave become outcomes by what is observed; memory and other workers are untouched."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tideforge.data.workload import RequestShape
from tideforge.engine import memory, protocol
from tideforge.engine.blocks import BlockPool
from tideforge.engine.core import EngineCore
from tideforge.engine.forward import Forward
from tideforge.engine.lab import connect_keeper, keeper_status
from tideforge.engine.measure import draw_prompts, run_block
from tideforge.errors import CandidateError, UserError

SHAPES = [RequestShape(9, 4), RequestShape(5, 3)]

FAULTS = {
    "import_error": "import no_such_module_at_all\n",
    "syntax_error": "def build(:\n",
    "build_error": "def build(ctx):\n    return 1 / 0\n",
    "forward_error": "def build(ctx):\n    def f(batch):\n        raise KeyError('x')\n    return f\n",
    "not_finite": "def build(ctx):\n    return lambda batch: None\n",
    "exited": "import os\ndef build(ctx):\n    return lambda batch: os._exit(3)\n",
    "hung": "def build(ctx):\n    def f(batch):\n        while True:\n            pass\n    return f\n",
    "crashed": "import ctypes\ndef build(ctx):\n    return lambda batch: ctypes.string_at(0)\n",
    "weights_written": "def build(ctx):\n    w = next(iter(ctx.weights.values()))\n    return lambda batch: w.zero_()\n",
    "out_of_memory": "def build(ctx):\n    raise MemoryError('no more')\n",
}  # fmt: skip


def run(lab, forward: Forward, name: str = "w", timeout_s: float = 2.0):
    arena = lab.arena(name)
    worker = lab.spawn(forward, arena)
    worker.step_timeout_s = timeout_s
    try:
        settings = lab.settings
        core = EngineCore(settings.limits, BlockPool(settings.num_blocks, settings.block_size, prefix_cache=False))
        core.attach(forward.id, worker)
        return run_block(core, forward.id, SHAPES, draw_prompts(SHAPES, range(200), 3), users=2)
    finally:
        lab.release(worker)


@pytest.mark.parametrize("outcome", FAULTS)
def test_a_fault_is_an_outcome_of_its_own(lab, outcome):
    with pytest.raises(CandidateError) as caught:
        run(lab, Forward({"forward.py": FAULTS[outcome]}))
    assert caught.value.outcome == outcome, caught.value.message


def test_a_good_forward_still_runs_after_all_that_and_weights_are_whole(lab, plain):
    before = keeper_status(lab.settings.state)
    block = run(lab, plain, timeout_s=20)
    with pytest.raises(CandidateError):
        run(lab, Forward({"forward.py": FAULTS["weights_written"]}))
    again = run(lab, plain, timeout_s=20)
    assert [a.tokens for a in block.answers] == [a.tokens for a in again.answers]
    after = keeper_status(lab.settings.state)
    assert (after["pid"], after["loads"], after["sha256"]) == (before["pid"], 1, before["sha256"])


def test_a_killed_worker_is_seen_as_its_signal(lab, plain):
    worker = lab.spawn(plain, lab.arena("w"))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(CandidateError, match="SIGKILL"):
        lab.stage(worker, plain, timeout_s=5)
    lab.release(worker)


def test_children_that_a_candidate_leaves_behind_are_ended(lab):
    source = "import subprocess\ndef build(ctx):\n    subprocess.Popen(['sleep', '60.25'], start_new_session=True)\n    1 / 0\n"
    worker = lab.spare(lab.arena("w"))
    try:
        with pytest.raises(CandidateError):
            lab.stage(worker, Forward({"forward.py": source}))
        assert worker.ward.census().processes == 1 and _sleepers() == 1
    finally:
        lab.release(worker)
    assert worker.ward.end().left == 1 and _sleepers() == 0


def _sleepers() -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes() == b"sleep\x0060.25\x00"
    return found


def test_nobody_can_write_sealed_weights(lab):
    weights = lab._ask_weights()
    with pytest.raises(PermissionError):
        os.pwrite(weights.fds[0], b"x", 0)
    import mmap

    with pytest.raises(PermissionError):
        mmap.mmap(weights.fds[0], 4096)


def test_the_authority_reads_the_pages_that_a_worker_wrote(lab, plain):
    arena = lab.arena("seen")
    arena.fill(0)
    run(lab, plain, "seen", 20)
    written = sum(bool(np.any(arena.plane(layer, values))) for layer in range(2) for values in (False, True))
    assert written == 4


def test_a_keeper_of_another_precision_is_refused(lab):
    with pytest.raises(UserError, match="keeper holds"):
        connect_keeper(dataclasses.replace(lab.settings, dtype="bfloat16"))


def test_an_unknown_request_leaves_the_keeper_alive(lab):
    with connect_keeper(lab.settings) as sock:
        with pytest.raises(Exception, match="does not know"):
            protocol.call(sock, {"type": "dance"}, 5)
        assert protocol.call(sock, {"type": "status"}, 5).header["loads"] == 1


def test_bf16_rounds_to_nearest_even():
    from tideforge.engine.keeper import convert

    values = np.array([1.0, 1.00390625, 1.01171875, -2.7182817], np.float32)
    bits = convert(values, "F32", "bfloat16")
    assert bits.tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC02E]
    assert np.array_equal(convert(bits, "BF16", "float32").view(np.uint32) >> 16, bits)
    assert memory.ITEM_BYTES["bfloat16"] == 2
