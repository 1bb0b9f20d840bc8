from __future__ import annotations

import errno
from pathlib import Path

import pytest
from pydantic import ValidationError

from tideforge.data import files
from tideforge.errors import UserError
from tideforge.tasks.store import Run


def finished(run: Run, inputs: dict[str, str]) -> None:
    run.finish("rank", inputs, {"layouts": run.write_json("layouts", {"b": 1, "a": [2]})}, {"count": 1})


def test_a_finished_node_is_found_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs", "r1")
    assert run.done("rank", {"profile": "abc"}) is None
    finished(run, {"profile": "abc"})
    manifest = Run.open(tmp_path / "runs", "r1").done("rank", {"profile": "abc"})
    assert manifest is not None and manifest.extra == {"count": 1} and manifest.seconds >= 0
    assert run.read_json(manifest, "layouts") == {"a": [2], "b": 1}
    assert run.path(manifest, "layouts").name.startswith("layouts-" + manifest.outputs["layouts"].sha256[:16])
    with pytest.raises(ValidationError):
        manifest.node = "other"  # type: ignore[misc]


def test_other_inputs_or_a_changed_output_run_the_node_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r1")
    finished(run, {"profile": "abc"})
    manifest = run.need("rank")
    assert run.done("rank", {"profile": "other"}) is None
    run.path(manifest, "layouts").write_text("{}")
    assert run.done("rank", {"profile": "abc"}) is None
    with pytest.raises(UserError, match="run rank again"):
        run.read_json(manifest, "layouts")


def test_equal_content_has_one_name(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r1")
    source = tmp_path / "x.txt"
    source.write_text("hello")
    assert run.write_json("a", {"x": 1, "y": 2}) == run.write_json("a", {"y": 2, "x": 1})
    assert run.add_file("note", source) == run.write_bytes("note", ".txt", b"hello")
    assert len(list(run.folder.iterdir())) == 2


def test_wrong_names_and_missing_runs_are_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "r1")
    with pytest.raises(UserError, match="exists already"):
        Run.create(tmp_path, "r1")
    with pytest.raises(UserError, match="file name"):
        run.write_json("../x", 1)
    with pytest.raises(UserError, match="runs there: r1"):
        Run.open(tmp_path, "r2")
    with pytest.raises(UserError, match="has not run"):
        run.need("search")
    (run.folder / "search.json").write_text("{")
    with pytest.raises(UserError, match="delete it"):
        run.manifest("search")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(tmp_path, "r1")

    def full(self: Path, raw: bytes) -> int:
        with self.open("wb") as file:
            file.write(raw[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.Path, "write_bytes", full)
    with pytest.raises(UserError, match="disk is full") as caught:
        run.write_json("layouts", {"a": 1})
    assert caught.value.thing == str(run.folder)
    assert list(run.folder.iterdir()) == []


def test_a_real_full_device(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(UserError, match="disk is full"), files.whole(tmp_path / "x") as temporary:
        temporary.touch()
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(b"x")
    assert list(tmp_path.iterdir()) == []
