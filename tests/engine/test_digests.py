"""Digests of slots: numpy's and torch's are one function, any bit shows in its own slot, and a keeper answers with them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tideforge.engine import device, digests, memory
from tideforge.engine.config import Settings
from tideforge.engine.digests import Plane, multipliers, of_array, of_tensor
from tideforge.engine.lab import Lab, _Kept
from tideforge.engine.segment import DeviceSegment


@given(st.data(), st.integers(1, 9), st.integers(1, 7), st.integers(0, 2**128 - 1), st.integers(1, 40))
def test_any_bit_shows_in_its_slot_alone(data, slots: int, words: int, secret: int, at_once: int) -> None:
    plane = Plane(6, slots, 2 * words)
    size = slots * plane.each
    pages = np.frombuffer(bytearray(data.draw(st.binary(min_size=size + 9, max_size=size + 9))), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "WORDS", at_once)  # several parts
        before = of_array(pages, plane, secret)
        bit = data.draw(st.integers(0, size * 8 - 1))
        pages[6 + bit // 8] ^= 1 << bit % 8
        after = of_array(pages, plane, secret)
        assert np.flatnonzero(before != after).tolist() == [bit // 8 // plane.each]
        assert np.array_equal(after, of_tensor(torch.from_numpy(pages), plane, secret))


def test_a_digest_is_what_its_formula_says() -> None:
    words = [0xFFFF, 0, 0x8001]
    expected = sum(word * int(factor) for word, factor in zip(words, multipliers(7, 3), strict=True)) % (1 << 64)
    assert int(of_array(np.array(words, np.uint16).view(np.uint8), Plane(0, 1, 6), 7)[0]) == expected
    assert not np.array_equal(multipliers(7, 3), multipliers(8, 3))


class _Counting:
    """A keeper's segment in this process; counts the bytes that go to the mirror and back."""

    def __init__(self, kept: DeviceSegment) -> None:
        self.kept, self.moved = kept, 0

    def fetch(self, offset: int, count: int) -> None:
        self.moved += count
        self.kept.fetch(offset, count)

    def store(self, offset: int, count: int) -> None:
        self.moved += count
        self.kept.store(offset, count)

    def fill(self, count: int, value: int) -> None:
        self.kept.fill(count, value)

    def digests(self, planes: Sequence[Plane], secret: int) -> np.ndarray:
        return self.kept.digests(planes, secret)


def test_scattered_slots_move_no_more_than_themselves(monkeypatch) -> None:
    monkeypatch.setattr(
        device,
        "allocate",
        lambda size, place: (memory.create_segment("fake", size), torch.empty(size, dtype=torch.uint8)),
    )
    layout = memory.ArenaLayout(2, 6, 4, 1, 3, 5, "bfloat16", 1, 8)
    kept = DeviceSegment("a", layout.bytes, "cuda")
    keeping = _Counting(kept)
    arena = memory.Arena(layout, kept.fds[:1], keeping)
    before = arena.digests(3)
    slots = np.array([22, 1, 2, 9])
    data = np.arange(1, 21, dtype=np.uint16).reshape(4, 1, 5)
    arena.store(1, True, slots, data)
    assert keeping.moved == data.nbytes
    assert [places.tolist() for places in np.nonzero(before != arena.digests(3))] == [[3] * 4, [1, 2, 9, 22]]
    assert keeping.moved == data.nbytes and all(mark.shape == (24, 8) for mark in arena.marks(3))
    assert np.array_equal(arena.slots(1, True, slots), data) and keeping.moved == 2 * data.nbytes
    kept.close()


def test_a_keeper_answers_with_what_the_authority_computes(tiny, tmp_path, end_keeper) -> None:
    end_keeper(tmp_path / "s")
    with contextlib.closing(Lab(Settings(state=tmp_path / "s", model=tiny, num_blocks=8))) as lab:
        arena = lab.arena("w")
        arena.fill(0x42)
        arena.store(0, True, [5], arena.slots(0, True, np.array([5])) + 1)
        asked = _Kept(lab, "w").digests(arena.layout.planes, 2**127 + 1)
        own = arena.digests(2**127 + 1)
        assert asked.dtype == np.uint64 and np.array_equal(asked, own)
        assert np.flatnonzero(own[1] != own[1, 0]).tolist() == [5]
