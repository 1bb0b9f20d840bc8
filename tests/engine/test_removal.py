"""What a worker left is removed: however deep, whatever it allows, and nothing that its links lead to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab
from tideforge.engine.removal import remove
from tideforge.engine.spawn import sweep
from tideforge.engine.ward import MARKER

DEEP = "for i in range(1100):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\n    open('f', 'w').close()\n"
LEAVES = (
    "import os\ndef build(ctx):\n    top = os.getcwd()\n    os.makedirs('closed/in')\n    DEEP\n"
    "    os.chdir(top)\n    os.chmod('closed/in', 0)\n    os.chmod('closed', 0)\n    return lambda batch: None\n"
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


CLOSED = """
import ctypes, os, tempfile
from pathlib import Path
from tideforge.engine.lab import Lab
from tideforge.engine.removal import remove
if os.geteuid() == 0:  # whom permissions do not bind
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else its own /proc is root's
top = Path(tempfile.mkdtemp())
(top / "a" / "b" / "c").mkdir(parents=True)
(top / "a" / "f").touch()
for each in ("a/b/c", "a/b", "a", "."):
    (top / each).chmod(0)
try:
    os.listdir(top)
except PermissionError:
    print("closed")
print(remove(top), top.exists())
"""


def test_folders_without_permissions_are_removed_by_their_owner() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["closed", "True", "False"]


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


def gone(folder: Path) -> bool:
    """Within a minute: a warden clears its worker's folder after its report, and nobody waits long for that."""
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not folder.exists()


@pytest.mark.parametrize("killed", [False, True])
def test_a_workers_deep_folder_ends_with_it_and_at_latest_at_the_next_start(lab, killed: bool) -> None:
    source = LEAVES.replace("DEEP", DEEP.strip().replace("\n", "\n    "))
    worker = lab.spawn(Forward({"forward.py": source}), lab.arena("d"))
    own = worker.ward.own
    assert next(own.glob("d*")).is_dir()
    sweep(own.parent)
    assert next(own.glob("d*")).is_dir(), "its worker lives"
    if killed:
        worker.ward._kill_warden()
    lab.release(worker)
    if killed:
        Lab(lab.settings).close()
        assert not own.exists()
    else:
        assert gone(own)
