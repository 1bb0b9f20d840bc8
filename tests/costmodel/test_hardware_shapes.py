"""Data sheets and model shapes: figures agree with their sources, bad files are named in one line."""

import json
from importlib import resources
from pathlib import Path

import pytest

from tideforge.costmodel import hardware, shapes
from tideforge.errors import UserError

STATED = json.loads((resources.files("tideforge.data") / "model_shapes.json").read_text())["models"]


def test_every_accelerator_names_its_source_and_h200_reads_as_its_data_sheet():
    assert len(hardware.names()) == 16
    assert all(hardware.get(name).source for name in hardware.names())
    h200 = hardware.get("H200_SXM")
    assert (h200.memory_bytes, h200.read_bytes_per_s, h200.flops("bf16")) == (141_000_000_000, 4.8e12, 989e12)
    assert h200.flops("fp4") == h200.flops("fp8") == 1979e12  # no fp4 units: widened


def test_cpu_figures_are_tagged_as_guesses():
    cpu = hardware.get("cpu")
    assert cpu.tag("read_bytes_per_s") == cpu.tag("flops_per_s.fp32") == "guessed"
    assert hardware.get("h200").tag("read_bytes_per_s") == "spec-sheet"


def test_unknown_hardware_lists_near_names():
    with pytest.raises(UserError, match="h200-sxm") as caught:
        hardware.get("h20-sxm")
    assert "\n" not in str(caught.value)


def entry(**changes: object) -> dict[str, object]:
    record: dict[str, object] = dict(
        memory_bytes=10**9, read_bytes_per_s=10**9, flops_per_s={"bf16": 1e12, "fp32": 1e12}, link_bytes_per_s=1e9,
        node_link_bytes_per_s=1e9, gpus_per_node=2, link_domain=2, source="mine",
    )  # fmt: skip
    return record | changes


def test_a_file_adds_an_accelerator(tmp_path: Path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"accelerators": {"mine": entry()}}))
    assert hardware.get(str(path)).name == "mine"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"accelerators": {"x": 3}}', '{"accelerators": {"x": {}}}', '{"accelerators": {}}'),
        json.dumps({"accelerators": {"x": entry(memory_bytes=0)}}),
        json.dumps({"accelerators": {"x": entry(flops_per_s={})}}),
    ],
)
def test_bad_hardware_files_are_one_line(tmp_path: Path, text: str):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.json") as caught:
        hardware.get(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, raw in STATED.items() if "stated" in raw])
def test_parameter_counts_come_out_as_stated(name: str):
    shape, stated = shapes.get(name), STATED[name]["stated"]
    assert shape.total_parameters / 1e9 == pytest.approx(stated["total_params_B"], rel=5e-3)
    if active := stated.get("active_params_B_incl_embeddings"):
        assert shape.active_parameters / 1e9 == pytest.approx(active, rel=5e-3)
    dense_attention = all(g.ratio == 1 and not g.index for g in shape.attention)
    if "kv_elements_per_token" in stated and dense_attention:
        assert shape.kv_elements(4096) / 4096 == stated["kv_elements_per_token"]


def test_documented_totals_of_models_without_config():
    flash = shapes.get("DeepSeek-V4.1-Flash")
    assert flash.assumed
    assert flash.total_parameters / 1e9 == pytest.approx(552, rel=0.02)
    assert flash.active_parameters / 1e9 == pytest.approx(16, rel=0.15)
    assert shapes.get("Kimi-K3").experts.hidden == 3584  # latent experts


def test_windows_and_state_bound_the_cache():
    oss, kimi = shapes.get("gpt-oss-120b"), shapes.get("Kimi-K3")
    assert oss.kv_elements(8192) - oss.kv_elements(4096) == 18 * 4096 * 2 * 8 * 64  # full layers alone grow
    assert kimi.kv_elements(2000) - kimi.kv_elements(1000) == 24 * 1000 * 576
    assert shapes.get("DeepSeek-V3.2").kv_read_elements(100_000) < shapes.get("DeepSeek-V3").kv_read_elements(100_000)


def test_names_with_owner_and_suffix_and_a_config_folder(tmp_path: Path):
    assert shapes.get("Qwen/Qwen3-235B-A22B-FP8").name == "Qwen3-235B-A22B"
    config = dict(STATED["Mixtral-8x7B"]["config"], num_local_experts=8)
    del config["n_routed_experts"], config["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 14336}))
    assert shapes.get(str(tmp_path)).total_parameters == shapes.get("Mixtral-8x7B").total_parameters
    (tmp_path / "config.json").write_text(json.dumps({"text_config": STATED["Llama-3.1-8B"]["config"]}))
    assert shapes.get(str(tmp_path / "config.json")).layers == 32


LLAMA = STATED["Llama-3.1-8B"]["config"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        "{}",
        json.dumps({**LLAMA, "num_hidden_layers": "many"}),
        json.dumps({**LLAMA, "num_attention_heads": 0}),
        json.dumps({**LLAMA, "vocab_size": -1}),
        json.dumps({**LLAMA, "num_experts": 4, "num_experts_per_tok": 8}),
        json.dumps({**LLAMA, "layer_types": ["full_attention"]}),
        json.dumps({**LLAMA, "text_config": 3}),
    ],
)
def test_bad_configs_are_one_line(tmp_path: Path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        shapes.get(str(path))
    assert "\n" not in str(caught.value)


def test_missing_config_and_unknown_model():
    with pytest.raises(UserError, match="does not exist"):
        shapes.get("nowhere/config.json")
    with pytest.raises(UserError, match="DeepSeek-V3"):
        shapes.get("deepseek-v33")
