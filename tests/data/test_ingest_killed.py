"""A kill at any moment of an ingest leaves the manifest as it was or the new one, and running again completes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.data.format_samples import lines
from tideforge.data.ingest_report import IngestReport
from tideforge.tasks.endpoint import Endpoint, Hardware, Traffic
from tideforge.tasks.ingest import ingest
from tideforge.tasks.store import Manifest, Run

# Kills itself before the n-th step that changes the run's folder, as a kill from outside would at that moment.
CHILD = """
import os, signal, sys, tempfile
from pathlib import Path
steps = [int(sys.argv[2])]
def stop_at(event, args):
    if not any(isinstance(each, (str, os.PathLike)) and folder in os.fspath(each) for each in args):
        return
    writes = event == "open" and isinstance(args[1], str) and "w" in args[1]
    if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile"):
        steps[0] -= 1
        if steps[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
from tideforge.tasks.ingest import ingest
from tideforge.tasks.endpoint import Endpoint, Hardware, Traffic
from tideforge.tasks.store import Run
root = Path(sys.argv[1])
folder = str(root / "run")
endpoint = Endpoint(name="x", model=root, launch="tideforge serve", hardware=Hardware(name="cpu"), state=root,
                    traffic=Traffic(logs=[str(root / "logs")]))
sys.addaudithook(stop_at)
ingest(Run(root / "run"), endpoint)
sys.stdout.write("done"); sys.stdout.flush()
"""


def child(root: Path, steps: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(root), str(steps)], stdout=subprocess.PIPE)


def endpoint_of(root: Path) -> Endpoint:
    return Endpoint(
        name="x", model=root, launch="tideforge serve", hardware=Hardware(name="cpu"), state=root,
        traffic=Traffic(logs=[str(root / "logs")]),
    )  # fmt: skip


def add_log(root: Path, number: int, rows: int) -> None:
    row = {"input_length": 6, "output_length": 5, "hash_ids": [1]}
    (root / "logs").mkdir(exist_ok=True)
    lines(*({**row, "timestamp": number * 100_000 + at} for at in range(rows)))(root / "logs" / f"{number}.jsonl")


def state(run: Run) -> tuple[Manifest, int]:
    """The manifest and the kept rows, which must be those of whole files that hash to what it says."""
    manifest = run.need("ingest")
    assert all(run.intact(output) for output in manifest.outputs.values())
    report = IngestReport.model_validate(run.read_json(manifest, "report"))
    assert pq.read_metadata(run.path(manifest, "requests")).num_rows == report.kept == manifest.extra["kept"]
    return manifest, report.kept


@pytest.mark.slow
def test_a_kill_at_each_step_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "run")
    add_log(tmp_path, 0, 50)
    ingest(run, endpoint_of(tmp_path))
    old = state(run)
    add_log(tmp_path, 0, 70)  # the log changed: ingest has to run again
    kept = []
    said = b""
    for steps in range(1, 60):
        ended = child(tmp_path, steps)
        said = ended.communicate(timeout=100)[0]
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL and said == b""
        now = state(run)
        assert now == old or now[1] == 70
        kept.append(now[1])
    assert said == b"done" and state(run)[1] == 70, "it never came to its end"
    assert len(kept) >= 15 and kept[0] == 50 and kept[-1] == 70  # killed before the manifest and behind it
    assert not [path.name for path in run.folder.iterdir() if path.name.startswith(".")]


def test_a_kill_before_the_manifest_is_mended_by_running_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "run")
    add_log(tmp_path, 0, 50)
    for steps in (2, 9):
        ended = child(tmp_path, steps)
        ended.communicate(timeout=100)
        assert ended.returncode == -signal.SIGKILL and run.manifest("ingest") is None
    ingest(run, endpoint_of(tmp_path))
    assert state(run)[1] == 50
    assert not [path.name for path in run.folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_kill_at_any_time_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "run")
    add_log(tmp_path, 0, 50)
    ingest(run, endpoint_of(tmp_path))
    chance = random.Random(5)
    for number in range(1, 9):
        old, kept = state(run)
        add_log(tmp_path, 0, 50 + 20_000 * number)
        running = child(tmp_path, 0)
        time.sleep(chance.uniform(0.2, 2.5))
        os.kill(running.pid, signal.SIGKILL)
        running.communicate(timeout=100)
        assert state(run) in ((old, kept), (run.manifest("ingest"), 50 + 20_000 * number))
        ingest(run, endpoint_of(tmp_path))
        assert state(run)[1] == 50 + 20_000 * number
