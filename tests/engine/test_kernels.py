"""Compiled kernels that are copied are found where they were copied to."""

from __future__ import annotations

import json
import shutil

import pytest
from triton.runtime.cache import FileCacheManager

from tideforge.engine.kernels import copy_kernels


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A kernel of two files as Triton keeps it in `made`, seen from `cache`; call it with a folder."""

    def cache(folder: str) -> FileCacheManager:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        return FileCacheManager("kernel")

    made = cache("made")
    made.put_group(
        "k.json", {name: made.put(data, name) for name, data in (("k.json", b"{}"), ("k.cubin", b"\x7fELF"))}
    )
    return cache


def test_a_copied_kernel_is_whole_without_the_folder_it_was_compiled_in(group, tmp_path):
    copy_kernels(tmp_path / "made", tmp_path / "copied")
    shutil.rmtree(tmp_path / "made")
    found = group("copied").get_group("k.json")
    assert found == {name: str(tmp_path / "copied" / "kernel" / name) for name in ("k.json", "k.cubin")}
    assert (tmp_path / "copied" / "kernel" / "k.cubin").read_bytes() == b"\x7fELF"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"child_paths": 3}', "[" * 100_000, "\x00"])
def test_a_groups_file_that_is_none_is_left_out(text, tmp_path):
    source = tmp_path / "made" / "kernel"
    source.mkdir(parents=True)
    (source / "__grp__k.json").write_text(text)
    (source / "k.json").write_text(json.dumps({}))
    copy_kernels(tmp_path / "made", tmp_path / "copied")
    assert [path.name for path in (tmp_path / "copied").rglob("*.json")] == ["k.json"]
