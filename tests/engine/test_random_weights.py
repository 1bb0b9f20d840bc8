"""Random weights have the figures, names and sizes of real ones, the same values wherever they are drawn, all the entropy that
bf16 holds, and logits that tell a right forward from a wrong one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tideforge.engine import doubles, random_weights
from tideforge.engine.model_config import ModelConfig, model_for
from tideforge.engine.random_weights import RandomWeights, describe, write
from tideforge.engine.reference_model import ReferenceModel
from tideforge.engine.stored import open_folder
from tideforge.errors import UserError

KNOWN = json.loads((Path(__file__).parents[2] / "data" / "model_shapes.json").read_text())["models"]
OTHER_NAMES = {"qwen3-30b-a3b": {"n_routed_experts": "num_experts"}}
NOT_THERE = {
    "qwen3-30b-a3b": {"n_shared_experts", "first_k_dense_replace"},  # 0 of each
    "deepseek-v3": {"num_nextn_predict_layers", "quantization_config"},  # it drafts no tokens, and is in bf16
}
REAL = {"qwen3-8b": "Qwen3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "deepseek-v3": "DeepSeek-V3"}
SMALL = {
    "vocab_size": 300, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
ROUTING = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
TINY = ("llama-tiny", "moe-tiny", "mla-tiny")
CPU = torch.device("cpu")


def drawn(folder: Path) -> dict[str, torch.Tensor]:
    weights = RandomWeights.load(folder)
    return {name: weights.tensor(name, CPU) for name in weights.names}


@pytest.mark.parametrize("shape", sorted(REAL))
def test_figures_are_those_of_the_spec_file(shape: str) -> None:
    mine, known = random_weights.SHAPES[shape], KNOWN[REAL[shape]]
    names, absent = OTHER_NAMES.get(shape, {}), NOT_THERE.get(shape, set())
    expected = {names.get(name, name): value for name, value in known["config"].items() if name not in absent}
    assert len(expected) > 9
    assert {name: mine[name] for name in expected} == expected
    numbers = sum(math.prod(size) for _, size, _ in random_weights.tensors(mine))
    assert round(numbers / 1e9, 2) == known["stated"]["total_params_B"]


@pytest.mark.parametrize("name", sorted(doubles.DOUBLES))
def test_names_and_sizes_are_those_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    folder = doubles.DOUBLES[name](tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        there = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  # it is no mapping
    listed = [(key, size) for key, size, _ in random_weights.tensors(json.loads((folder / "config.json").read_text()))]
    assert len(listed) == len(dict(listed))
    assert dict(listed) == there


def test_the_first_layers_only(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", "llama-tiny")
    first = write(tmp_path / "first", "llama-tiny", layers=1)
    assert [ModelConfig.load(folder).num_hidden_layers for folder in (whole, first)] == [2, 1]
    one, two = (load_file(folder / "model.safetensors") for folder in (first, whole))
    assert set(one) == {name for name in two if "layers.1." not in name}
    assert all(torch.equal(one[name], two[name]) for name in one)
    before = (whole / "model.safetensors").stat().st_mtime_ns
    assert write(whole, "llama-tiny") == whole
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    write(whole, "llama-tiny", layers=1)
    assert set(load_file(whole / "model.safetensors")) == set(one)
    write(whole, "llama-tiny", layers=1, seed=1)
    other = load_file(whole / "model.safetensors")
    assert not any(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("shape", TINY)
def test_a_described_folder_stands_for_the_values_of_a_written_one(shape: str, tmp_path: Path) -> None:
    described, written = describe(tmp_path / "described", shape, 7), write(tmp_path / "written", shape, 7)
    assert sorted(path.name for path in described.iterdir()) == ["config.json", "random.json"]
    assert (described / "config.json").read_text() == (written / "config.json").read_text()
    assert sum(path.stat().st_size for path in described.iterdir()) < 2000
    one, other = drawn(described), load_file(written / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == torch.bfloat16 for name in one)
    assert model_for(ModelConfig.load(described).architecture).joinpath("forward.py").is_file()


def test_a_fresh_process_draws_the_same_in_any_order(tmp_path: Path) -> None:
    folder = describe(tmp_path / "m", "moe-tiny", 3)
    code = (
        "import sys, torch; from pathlib import Path; from safetensors.torch import save_file\n"
        "from tideforge.engine.random_weights import RandomWeights\n"
        "w = RandomWeights.load(Path(sys.argv[1])); cpu = torch.device('cpu')\n"
        "save_file({name: w.tensor(name, cpu) for name in reversed(w.names)}, sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(tmp_path / "theirs")], check=True, timeout=60)
    ours, theirs = drawn(folder), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_seed_gives_other_weights_and_no_two_tensors_are_alike(tmp_path: Path) -> None:
    one, other = (drawn(describe(tmp_path / str(seed), "moe-tiny", seed)) for seed in (0, 1))
    assert not any(torch.equal(one[name], other[name]) for name in one)
    beginnings = [tuple(tensor.flatten()[:8].tolist()) for values in (one, other) for tensor in values.values()]
    assert len(set(beginnings)) == len(beginnings) == 2 * len(one)


def test_chunks_of_a_tensor_differ_and_values_are_of_bf16_whatever_they_are_put_into(monkeypatch) -> None:
    monkeypatch.setattr(random_weights, "CHUNK", 1 << 12)
    weights = RandomWeights(random_weights.SHAPES["llama-tiny"], 0)
    name = "model.embed_tokens.weight"  # 320 x 64: five chunks
    expected = weights.tensor(name, CPU)
    parts = expected.flatten().split(1 << 12)
    assert len(parts) == 5 and not any(torch.equal(parts[0], part) for part in parts[1:])
    for dtype in (torch.float32, torch.float16):
        target = torch.full_like(expected, torch.nan, dtype=dtype)
        weights.fill(name, target)
        assert torch.equal(target, expected.to(dtype))


def test_a_tensor_has_the_entropy_that_a_normal_distribution_has_in_bf16() -> None:
    weights = RandomWeights(random_weights.SHAPES["qwen3-30b-a3b"], 0)
    values = weights.tensor("model.layers.5.mlp.experts.77.up_proj.weight", CPU)
    bits = values.flatten().view(torch.int16).int() & 0xFFFF
    ones = [((bits >> place) & 1).float().mean().item() for place in (*range(7), 15)]
    assert all(0.4 < share < 0.6 for share in ones)  # mantissa and sign; the density's slope favours small mantissas
    shares = bits.bincount().double() / len(bits)
    shares = shares[shares > 0]
    assert len(shares) > 3000 and abs(entropy_in_bf16(2048**-0.5) + float((shares * shares.log2()).sum())) < 0.01
    wide = values.float()
    assert abs(wide.std().item() * 2048**0.5 - 1) < 0.005 and abs(wide.mean().item()) < 1e-4
    assert (wide @ wide.T - torch.eye(768)).abs().max() < 0.2  # no row repeats another


def entropy_in_bf16(deviation: float) -> float:
    """Bits of a normal distribution around 0, rounded: each positive value has the probability between its neighbours' midpoints."""
    positive = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    below = torch.distributions.Normal(0.0, deviation).cdf((positive[1:] + positive[:-1]) / 2)
    shares = below.diff()
    shares = shares[shares > 0]
    return -2 * float((shares * shares.log2()).sum())


@pytest.mark.parametrize("shape", [*sorted(REAL), *TINY])
def test_logits_spread_and_tokens_differ(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers the logits of a tiny shape, or of a real one made small, spread by 1 to 5 and the likeliest token changes."""
    from transformers import AutoModelForCausalLM

    if shape == "deepseek-v3":
        pytest.skip("mla-tiny is what it is made small")
    if shape in REAL:
        config = {**random_weights.SHAPES[shape], **SMALL, **(ROUTING if shape == "qwen3-30b-a3b" else {})}
        monkeypatch.setattr(random_weights, "SHAPES", {shape: config})
    folder, tokens = write(tmp_path, shape), torch.arange(3, 131)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(tokens[None]).logits[0]
    assert 1 < logits.std() < 5
    assert len(set(logits.argmax(-1).tolist())) > 32
    torch.testing.assert_close(ReferenceModel(folder).forward(tokens.tolist()).logits, logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("room", [None, 0, 5000])
def test_the_reference_draws_what_it_has_no_room_for(shape: str, room: int | None, tmp_path: Path) -> None:
    tokens = list(range(3, 40))
    expected = ReferenceModel(write(tmp_path / "written", shape)).forward(tokens)
    model = ReferenceModel(describe(tmp_path / "described", shape), room=room)
    for _ in range(2):
        found = model.forward(tokens)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    kept = sum(tensor.nbytes for tensor in model._kept.values())
    assert kept == 0 if room == 0 else 0 < kept <= (room or kept)


def test_a_folder_that_cannot_be_followed_is_named(tmp_path: Path) -> None:
    described, written = describe(tmp_path / "d", "llama-tiny"), write(tmp_path / "w", "llama-tiny")
    for folder, make in ((described, write), (written, describe)):
        with pytest.raises(UserError, match="another folder"):
            make(folder, "llama-tiny")
    (written / "random.json").write_text((described / "random.json").read_text())
    with pytest.raises(UserError, match="another folder"):
        open_folder(written)
    with pytest.raises(UserError, match="no shape"):
        describe(tmp_path / "n", "gpt-5")
    with pytest.raises(UserError, match="1 to 2"):
        describe(tmp_path / "n", "llama-tiny", layers=3)
    assert not (tmp_path / "n").exists()
    for text, said in (("{", "no description"), ("[]", "no description"), ('{"version": 0, "seed": 1}', "version 0"),
                       ('{"version": 1, "seed": "x"}', "integer")):  # fmt: skip
        (described / "random.json").write_text(text)
        with pytest.raises(UserError, match=said) as caught:
            open_folder(described)
        assert "random.json" in str(caught.value) and "\n" not in str(caught.value)
