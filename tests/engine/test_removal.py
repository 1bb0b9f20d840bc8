"""What a worker left is removed: however deep, whatever it allows, and nothing that its links lead to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tideforge.engine import removal
from tideforge.engine.forward import Forward
from tideforge.engine.removal import remove
from tideforge.engine.spawn import sweep
from tideforge.engine.ward import MARKER

DEEP = "for i in range(3000):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\n    open('f', 'w').close()\n"
LEAVES = (
    "import os\ndef build(ctx):\n    top = os.getcwd()\n    DEEP\n    os.chdir(top)\n    return lambda batch: None\n"
)


def deep(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", f"import os\n{DEEP}"], cwd=folder, check=True)


def test_a_folder_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    deep(tmp_path / "x")
    assert remove(tmp_path / "x") and list(tmp_path.iterdir()) == []


def test_what_links_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "kept" / "below").mkdir(parents=True)
    (tmp_path / "kept" / "file").write_text("kept")
    inner = tmp_path / "x" / "a" / "b"
    inner.mkdir(parents=True)
    for place in (tmp_path / "x" / "link", inner / "link"):
        place.symlink_to(tmp_path / "kept")
    (inner / "loop").symlink_to(tmp_path / "x")
    os.mkfifo(inner / "fifo")
    (tmp_path / "to_all").symlink_to(tmp_path / "kept")
    assert remove(tmp_path / "x") and remove(tmp_path / "to_all") and remove(tmp_path / "never")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").read_text() == "kept" and (tmp_path / "kept" / "below").is_dir()


def test_folders_without_permissions_are_removed_by_their_owner() -> None:
    source = f"import os, tempfile\nfrom pathlib import Path\n{Path(removal.__file__).read_text().partition('import annotations')[2]}"
    source += "top = Path(tempfile.mkdtemp())\n(top / 'a' / 'b' / 'c').mkdir(parents=True)\n(top / 'a' / 'f').touch()\n"
    source += (
        "for each in ('a/b/c', 'a/b', 'a', '.'):\n    (top / each).chmod(0)\nassert remove(top) and not top.exists()\n"
    )
    user = 65534 if os.geteuid() == 0 else None  # permissions do not bind root
    done = subprocess.run([sys.executable, "-I", "-c", source], user=user, capture_output=True, text=True, cwd="/")
    if "Permission denied" in done.stderr and "remove" not in done.stderr:
        pytest.skip("this interpreter is root's own")
    assert done.returncode == 0, done.stderr


def test_what_takes_too_long_is_left(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    assert not remove(tmp_path / "x", 0) and (tmp_path / "x").is_dir()
    assert remove(tmp_path / "x")


def test_only_folders_that_nobody_lives_in_are_swept(tmp_path: Path) -> None:
    dead, live, other = ("00aa" * 4, "11bb" * 4, "attempt")
    for name in (dead, live, other):
        (tmp_path / name).mkdir()
    deep(tmp_path / dead)
    sleeper = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env={MARKER: live})
    try:
        sweep(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [live, other]
    finally:
        assert sleeper.stdin is not None
        sleeper.stdin.close()
        sleeper.wait()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [other]
    sweep(tmp_path / "never")


@pytest.mark.parametrize("killed", [False, True])
def test_a_workers_deep_folder_ends_with_it(lab, killed: bool) -> None:
    source = LEAVES.replace("DEEP", DEEP.strip().replace("\n", "\n    "))
    worker = lab.spawn(Forward({"forward.py": source}), lab.arena("d"))
    own = worker.ward.own
    assert next(own.glob("d*")).is_dir()
    sweep(own.parent)
    assert next(own.glob("d*")).is_dir(), "its worker lives"
    if killed:
        worker.ward._kill_warden()
    lab.release(worker)
    assert not own.exists()
