"""A worker that is started beside one that serves touches nothing that the other one computes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.serving.conftest import LLAMA
from tideforge.engine.config import Limits, Settings
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab, end_keeper
from tideforge.engine.memory import Arena
from tideforge.engine.serving.rehearsal import dummy_step, rehearse

MARK = 0x42


def written(arena: Arena) -> set[int]:
    """Pages of any layer that no longer hold the mark."""
    planes = [arena.plane(layer, values) for layer in range(arena.layout.num_layers) for values in (False, True)]
    changed = [(plane.view(np.uint8) != MARK).reshape(len(plane), -1).any(axis=1) for plane in planes]
    return set(np.flatnonzero(np.any(changed, axis=0)).tolist())


def test_a_rehearsal_leaves_live_pages_and_logits_alone(model: Path, tmp_path: Path) -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=64)
    settings = Settings(tmp_path / "s", model, limits=limits, block_size=8, num_blocks=16)
    lab = Lab(settings, private_logits=True)
    try:
        arena = lab.arena("server")
        arena.fill(MARK)
        before = arena.logits(4).copy()
        forward = Forward.load(LLAMA)
        worker = lab.spawn(forward, arena)
        rehearse(worker, forward.id, settings)
        assert written(arena) == {0}
        assert np.array_equal(arena.logits(4).view(np.uint32), before.view(np.uint32))
    finally:
        lab.close()
        end_keeper(settings.state)


def test_a_dummy_step_is_a_prefill_or_a_decode_of_the_dummy_page() -> None:
    prefill, decode = dummy_step("f", 2, 17, 8), dummy_step("f", 3, 1, 8)
    assert prefill.slot_mapping.max() < 8 and not prefill.block_tables.any() and prefill.block_tables.shape == (2, 3)
    assert (prefill.num_prefills, prefill.num_decodes, prefill.max_seq_len) == (2, 0, 32)
    assert prefill.logits_indices.tolist() == [16, 33] and prefill.positions[17] == 0
    assert (decode.num_prefills, decode.num_decodes, len(decode.request_ids)) == (0, 3, 3)
