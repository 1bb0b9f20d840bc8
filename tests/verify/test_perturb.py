"""Other weights: the same ones for whoever has the seed, exact, and the endpoint's own left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tideforge.engine import memory
from tideforge.engine.keeper import Keeper
from tideforge.engine.perturb import Perturbed, negate, negated_rows
from tideforge.engine.random_weights import describe
from tideforge.engine.reference import Reference
from tideforge.engine.stored import open_folder
from tideforge.engine.weights import Checkpoint

from .conftest import Place


def held(keeper: Keeper, fd: int) -> dict[str, torch.Tensor]:
    pages = torch.frombuffer(memory.map_read_only(fd, keeper.size), dtype=torch.uint8)
    kind = getattr(torch, keeper.dtype)
    return {e.name: pages[e.offset : e.offset + e.bytes].view(kind).reshape(e.shape) for e in keeper.entries}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_keepers_other_weights_are_its_own_with_rows_negated(llama: Place, dtype: str) -> None:
    keeper = Keeper(llama.settings.model, dtype)
    header, fds = keeper.answer({"type": "perturb", "seed": 5})
    own, other = held(keeper, keeper.weights.fds[-1]), held(keeper, fds[0])
    assert header["problem"] == "" and header["sha256"] == keeper.sha256
    for name, tensor in own.items():
        stored = torch.from_numpy(Checkpoint(llama.settings.model).float32(name).copy())
        assert torch.equal(tensor, stored.to(tensor.dtype))
        sign = torch.where(torch.from_numpy(negated_rows(5, name, len(tensor))), -1.0, 1.0)
        assert torch.equal(other[name].float(), tensor.float() * sign.view(-1, *[1] * (tensor.dim() - 1)))
        assert not torch.equal(other[name], tensor)
    with pytest.raises(OSError):
        os.pwrite(fds[0], b"x", 0)
    keeper.answer({"type": "unperturb"})
    assert keeper.other is None and keeper.weights.restore()


def test_a_second_copy_that_has_no_room_is_a_problem_in_words(llama: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(llama.settings.model, "float32")
    monkeypatch.setattr("tideforge.engine.keeper.free_bytes", lambda device: keeper.size)
    header, fds = keeper.answer({"type": "perturb", "seed": 5})
    assert fds == [] and f"{keeper.size} are free" in header["problem"]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_random_weights_are_perturbed_alike(tmp_path: Path) -> None:
    model = describe(tmp_path / "model", "llama-tiny")
    keeper, source = Keeper(model, "bfloat16"), open_folder(model)
    _, fds = keeper.answer({"type": "perturb", "seed": 9})
    other = held(keeper, fds[0])
    for name in source.names:
        assert torch.equal(other[name], Perturbed(source, 9).tensor(name, torch.device("cpu")))


@given(st.integers(0, 2**63), st.integers(1, 300))
def test_some_rows_always_and_the_same_ones_for_a_seed_and_name(seed: int, rows: int) -> None:
    chosen = negated_rows(seed, "a", rows)
    assert chosen.any() and np.array_equal(chosen, negated_rows(seed, "a", rows))
    tensor = torch.arange(1.0, rows + 1)
    negate(tensor, seed, "a")
    assert np.array_equal((tensor < 0).numpy(), chosen)
    negate(tensor, seed, "a")
    assert torch.equal(tensor, torch.arange(1.0, rows + 1))


def test_the_reference_answers_for_a_seed_and_for_none_in_turn(llama: Place) -> None:
    with contextlib.closing(Reference.start(llama.settings.model)) as reference:
        other = reference.perturbed(3)
        plain, moved = reference.logits(range(1, 9)), other.logits(range(1, 9))
        assert np.array_equal(plain, reference.logits(range(1, 9)))
        assert np.array_equal(moved, other.logits(range(1, 9)))
        assert not np.array_equal(moved, reference.perturbed(4).logits(range(1, 9)))
        assert np.abs(moved - plain).max() > 100 * llama.bounds.logit
        assert dataclasses.astuple(other.bounds("float32")) != dataclasses.astuple(llama.bounds)
