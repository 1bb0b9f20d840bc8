"""The honesty measurement runs, pairs what it should pair, and sees that both decode the same text. No timing bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tideforge.engine import baseline, doubles
from tideforge.errors import UserError


@pytest.mark.parametrize("make", [doubles.tiny_llama, doubles.tiny_moe, doubles.tiny_deepseek])
def test_raw_and_transformers_decode_the_same_text(make: Callable[[Path], Path], tmp_path: Path) -> None:
    found = baseline.baseline(make(tmp_path), prompt_tokens=20, steps=15, rounds=2)
    assert found.agreeing_tokens == found.decoded_tokens == 15
    assert len(found.ratios) == 2 and found.ratio > 0
    assert found.transformers_tps == max(
        tps for name, tps in found.lanes_tps.items() if name.startswith("transformers")
    )


def test_floor_counts_what_one_token_reads(tmp_path: Path) -> None:
    hidden, kv = doubles.HIDDEN, doubles.KV_HEADS * doubles.HEAD_DIM
    attention = 2 * hidden * hidden + 2 * kv * hidden
    experts = 2 * 3 * hidden * hidden + 8 * hidden  # two of eight, and the router
    found = baseline.baseline(doubles.tiny_moe(tmp_path), prompt_tokens=2, steps=1, rounds=1)
    assert found.floor_bytes == 4 * (2 * (attention + experts) + doubles.VOCAB * hidden)


def test_ratios_are_paired_step_by_step() -> None:
    timing = baseline.Timing({"a": [[1.0, 2.0, 3.0]], "b": [[2.0, 8.0, 9.0]]}, {})
    assert timing.ratios("a", "b") == [3.0]
    assert timing.median_s("b") == 8.0


def test_bad_input_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        baseline.baseline(tmp_path)
    with pytest.raises(UserError, match="rounds"):
        baseline.baseline(tmp_path, rounds=0)
