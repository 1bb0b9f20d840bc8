"""Random checkpoints have the figures, names and sizes of real ones, and logits that tell a right forward from a wrong one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tideforge.engine import doubles, random_weights
from tideforge.engine.model_config import ModelConfig

KNOWN = json.loads((Path(__file__).parents[2] / "data" / "model_shapes.json").read_text())["models"]
OTHER_NAMES = {"n_routed_experts": "num_experts"}
NOT_THERE = {"n_shared_experts", "first_k_dense_replace"}  # 0 of each
REAL = {"qwen3-8b": "Qwen3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}


@pytest.mark.parametrize("shape", sorted(REAL))
def test_figures_are_those_of_the_spec_file(shape: str) -> None:
    mine, known = random_weights.SHAPES[shape], KNOWN[REAL[shape]]
    expected = {OTHER_NAMES.get(name, name): value for name, value in known["config"].items() if name not in NOT_THERE}
    assert len(expected) > 9
    assert {name: mine[name] for name in expected} == expected
    numbers = sum(math.prod(size) for _, size, _ in random_weights.tensors(mine))
    assert round(numbers / 1e9, 2) == known["stated"]["total_params_B"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_names_and_sizes_are_those_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    folder = doubles.DOUBLES[name](tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        there = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  # it is no mapping
    listed = [(key, size) for key, size, _ in random_weights.tensors(json.loads((folder / "config.json").read_text()))]
    assert len(listed) == len(dict(listed))
    assert dict(listed) == there


def test_the_first_layers_only(tmp_path: Path) -> None:
    whole = random_weights.write(tmp_path / "whole", "llama-tiny")
    first = random_weights.write(tmp_path / "first", "llama-tiny", layers=1)
    assert [ModelConfig.load(folder).num_hidden_layers for folder in (whole, first)] == [2, 1]
    one, two = (load_file(folder / "model.safetensors") for folder in (first, whole))
    assert set(one) == {name for name in two if "layers.1." not in name}
    assert all(torch.equal(one[name], two[name]) for name in one)
    before = (whole / "model.safetensors").stat().st_mtime_ns
    assert random_weights.write(whole, "llama-tiny") == whole
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    random_weights.write(whole, "llama-tiny", layers=1)
    assert set(load_file(whole / "model.safetensors")) == set(one)


@pytest.mark.parametrize("shape", sorted(REAL))
def test_logits_spread_and_tokens_differ(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real shape made small: by transformers its logits spread by 1 to 5 and the likeliest token changes."""
    from transformers import AutoModelForCausalLM

    small = {
        "vocab_size": 300, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32,
    }  # fmt: skip
    routing = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    config = {**random_weights.SHAPES[shape], **small, **(routing if shape == "qwen3-30b-a3b" else {})}
    monkeypatch.setattr(random_weights, "SHAPES", {"small": config})
    model = AutoModelForCausalLM.from_pretrained(random_weights.write(tmp_path, "small"), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.arange(3, 131)[None]).logits[0]
    assert 1 < logits.std() < 5
    assert len(set(logits.argmax(-1).tolist())) > 32
