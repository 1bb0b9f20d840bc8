"""Which files make a forward when a folder is read: plain ones that lie there, or in this package's own models."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tideforge.engine.forward import ENTRY, MODELS, Forward
from tideforge.errors import CandidateError, UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (made / ENTRY).write_text("a = 1\n")
    return made


def refused(folder: Path) -> str:
    with pytest.raises(CandidateError) as caught:
        Forward.load(folder)
    assert caught.value.outcome == "refused"
    return caught.value.message


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["x.py", "knobs.json", ENTRY])
def test_a_fifo_is_refused_and_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert f"{name} is no plain file" in refused(folder)


def test_a_folder_that_is_named_like_a_file_is_refused(folder: Path) -> None:
    (folder / "x.py").mkdir()
    assert "x.py is no plain file" in refused(folder)


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "../other.py", "../mine-too/x.py"])
def test_a_link_that_leads_out_is_refused(target: str, folder: Path) -> None:
    """Also to a folder whose name begins alike."""
    (folder.parent / "mine-too").mkdir()
    for other in (folder.parent / "other.py", folder.parent / "mine-too" / "x.py"):
        other.write_text("b = 2\n")
    (folder / "x.py").symlink_to(target)
    assert "x.py leads out of its folder" in refused(folder)


def test_a_link_that_leads_nowhere_tells_how_to_copy(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "moe", tmp_path / "mine", symlinks=True)  # as cp -r does
    if not (tmp_path / "mine" / "paged_attention.py").is_symlink():
        pytest.skip("this package was installed without its links")
    assert "paged_attention.py links to ../llama/paged_attention.py, which is not there" in (
        said := refused(tmp_path / "mine")
    )
    assert "cp -rL" in said


def test_links_within_the_folder_and_to_the_packages_models_are_read(folder: Path) -> None:
    (folder / "x.py").symlink_to(ENTRY)
    (folder / "paged_attention.py").symlink_to(MODELS / "llama" / "paged_attention.py")
    read = Forward.load(folder).files
    assert read["x.py"] == read[ENTRY] == "a = 1\n"
    assert read["paged_attention.py"] == (MODELS / "llama" / "paged_attention.py").read_text()


def test_a_folder_that_is_a_link_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert Forward.load(tmp_path / "link") == Forward.load(folder)


@pytest.mark.parametrize("model", ["llama", "moe", "mla"])
def test_the_packages_models_are_forwards(model: str) -> None:
    assert ENTRY in Forward.load(MODELS / model).files


def test_a_file_without_end_is_not_read_to_it(folder: Path) -> None:
    with (folder / "x.py").open("w") as file:
        file.truncate(1 << 40)
    assert "at most" in refused(folder)


def test_a_full_disk_leaves_nothing_half_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    forward = Forward.load(folder)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=r"forwards: the disk is full; free space"):
            forward.save(tmp_path / "forwards")
    assert list((tmp_path / "forwards").iterdir()) == []
    assert Forward.load(forward.save(tmp_path / "forwards")) == forward
