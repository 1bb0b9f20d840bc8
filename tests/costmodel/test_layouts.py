"""Legality rules of the engines, memory, and the way a refusal speaks."""

import pytest

from tideforge.costmodel.layouts import Layout, enumerate_layouts, refusal
from tideforge.costmodel.shapes import get


@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 16])
def test_every_layout_uses_all_gpus_and_none_comes_twice(gpus: int):
    found = list(enumerate_layouts(gpus))
    assert len(found) == len(set(found)) > 0
    assert {layout.gpus for layout in found} == {gpus}


@pytest.mark.parametrize(
    ("engine", "model", "layout", "word"),
    [
        ("vllm", "Qwen3-235B-A22B", Layout(tp=4, ep=8, dp=2), None),
        ("vllm", "Qwen3-235B-A22B", Layout(tp=4, ep=4, dp=2), "tp x dp x pcp = 8"),
        ("vllm", "Qwen3-235B-A22B", Layout(tp=8, dcp=2), None),
        ("vllm", "Qwen3-235B-A22B", Layout(tp=8, dcp=4), "4 KV heads"),
        ("vllm", "DeepSeek-V3", Layout(tp=8, dcp=8), None),
        ("vllm", "DeepSeek-V3", Layout(tp=2, dcp=4), "does not divide by dcp 4"),
        ("vllm", "Llama-3.1-8B", Layout(tp=2, ep=2), "dense"),
        ("vllm", "Llama-3.1-8B", Layout(tp=3), "32 attention heads"),
        ("vllm", "Llama-3.1-8B", Layout(pp=64), "32 layers"),
        ("vllm", "Llama-3.1-8B", Layout(replicas=2), "the same as dp 2"),
        ("vllm", "MiniMax-M2.5", Layout(tp=8), "quantisation blocks of 128"),
        ("vllm", "MiniMax-M2.5", Layout(tp=8, ep=8), None),
        ("sglang", "DeepSeek-V3", Layout(tp=8, dcp=2), "context parallel"),
        ("sglang", "DeepSeek-V3", Layout(tp=2, ep=4, dp=4), None),
        ("trtllm", "DeepSeek-V3", Layout(tp=8, ep=2), None),
        ("trtllm", "DeepSeek-V3", Layout(tp=2, dp=4), "attention tp 1"),
        ("trtllm", "DeepSeek-V3", Layout(ep=4, dp=8), None),
        ("tideforge", "Llama-3.1-8B", Layout(tp=2), "one device"),
        ("tideforge", "Llama-3.1-8B", Layout(), None),
    ],
)
def test_rules(engine: str, model: str, layout: Layout, word: str | None):
    found = refusal(layout, get(model), engine)
    assert (found is None) == (word is None)
    assert word is None or word in found.reason


def test_a_layout_has_no_size_below_one():
    with pytest.raises(ValueError, match="at least 1"):
        Layout(tp=0)
