"""Digests computed on a GPU. Skipped, with the reason printed, where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tideforge.engine import digests, memory
from tideforge.engine.segment import DeviceSegment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_digests_as_the_host_does_and_shows_one_byte(dtype: str, monkeypatch) -> None:
    monkeypatch.setattr(digests, "WORDS", 1 << 10)  # several parts
    layout = memory.ArenaLayout(2, 64, 16, 1, 3, 5, dtype, 1, 8)
    kept = DeviceSegment("a", layout.bytes, "cuda:0")
    kept.pages.copy_(torch.randint(0, 256, (layout.bytes,), dtype=torch.uint8))
    before = kept.digests(layout.planes, 2**100 + 7)
    kept.fetch(0, layout.pages_bytes)
    host = kept.mirror.numpy()
    assert np.array_equal(before, np.stack([digests.of_array(host, plane, 2**100 + 7) for plane in layout.planes]))
    plane = layout.planes[3]
    kept.pages[plane.offset + 77 * plane.each] ^= 0x80
    after = kept.digests(layout.planes, 2**100 + 7)
    assert [places.tolist() for places in np.nonzero(before != after)] == [[3], [77]]
    kept.close()
