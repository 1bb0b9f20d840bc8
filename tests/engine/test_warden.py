"""Whatever a worker starts ends with it: in a process namespace, and where none can be made."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tideforge.engine import procfs, warden
from tideforge.engine.forward import Forward
from tideforge.engine.lab import worker_environment
from tideforge.engine.spawn import Nursery
from tideforge.errors import CandidateError

# A child without this one's environment, in a session of its own, whose parent is gone.
ORPHAN = """
import subprocess
def build(ctx):
    subprocess.run(["/bin/sh", "-c", "sleep SECONDS & exit 0"], start_new_session=True, env=ENV, check=True)
    return lambda batch: None
"""
WITHOUT_NAMESPACES = "import tideforge.engine.guard as guard\nguard.enter_pid_namespace = lambda: False\n"


def test_threads_of_a_driver_do_not_count(monkeypatch, tmp_path) -> None:
    for thread, name in ((7, "python3"), (8, "cuda-EvtHandlr"), (9, "cuda00001c00008"), (10, "python3")):
        (tmp_path / "7" / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(thread) / "comm").write_text(f"{name}\n")
    monkeypatch.setattr(procfs, "PROC", str(tmp_path))
    assert (procfs.threads(7), procfs.threads(7, warden.DRIVER), procfs.threads(6)) == (4, 2, 0)


def sleepers(seconds: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes() == f"sleep\0{seconds}\0".encode()
    return found


def become(seconds: str, count: int) -> bool:
    deadline = time.monotonic() + 10
    while (found := sleepers(seconds)) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    return found == count


def levels(pid: int) -> int:
    """How many process namespaces it is in."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(len(line.split()) - 1 for line in lines if line.startswith("NSpid:"))


@pytest.fixture(params=["namespace", "descendants"])
def worker(request, lab, tmp_path, monkeypatch):
    if request.param == "descendants":
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_NAMESPACES)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        nursery = Nursery(lab.nursery.log, worker_environment(1))
        monkeypatch.setattr(lab, "nursery", nursery)
    worker = lab.spare(lab.arena("w"))
    if request.param == "descendants":
        assert levels(worker.pid) == levels(os.getpid())
    yield worker
    lab.release(worker)
    if request.param == "descendants":
        nursery.close()


def orphan(seconds: str, environment: str = "{}") -> Forward:
    return Forward({"forward.py": ORPHAN.replace("SECONDS", seconds).replace("ENV", environment)})


def test_an_orphan_in_a_session_of_its_own_is_counted_and_killed(lab, worker):
    lab.stage(worker, orphan("61.25"))
    assert become("61.25", 1) and worker.ward.census().processes == 1
    end = worker.ward.end()
    assert (end.left, end.undead, end.by_itself) == (1, 0, False) and sleepers("61.25") == 0
    assert not worker.alive and not list((lab.settings.state / "scratch").iterdir())


def test_all_ends_when_the_authority_is_gone(lab, worker):
    lab.stage(worker, orphan("62.25"))
    assert become("62.25", 1)
    worker.ward._control.close()  # what the kernel does when it dies
    assert become("62.25", 0)
    assert worker.ward._warden_ends(10) and not list((lab.settings.state / "scratch").iterdir())


def test_all_ends_when_the_warden_is_killed(lab, worker):
    lab.stage(worker, orphan("63.25", "None"))
    worker.ward._kill_warden()
    assert worker.ward._warden_ends(10)
    with pytest.raises(CandidateError) as caught:
        lab.stage(worker, orphan("63.25"))
    assert caught.value.outcome == "crashed" and become("63.25", 0)


def test_a_worker_that_is_stopped_can_be_continued(lab, worker, plain):
    lab.wait_ready(worker)
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.3)
    assert worker.ward.census().threads >= 1 and worker.alive
    os.kill(worker.pid, signal.SIGCONT)
    lab.stage(worker, plain)
    assert worker.alive


def test_the_log_keeps_the_head_of_what_a_worker_prints(lab, worker):
    source = "def build(ctx):\n    print('seen ' * 1000, flush=True)\n    print('x' * (4 << 20))\n    return lambda batch: None\n"
    lab.stage(worker, Forward({"forward.py": source}))
    worker.ward.end()
    log = (lab.settings.state / "logs" / "workers.log").read_text()
    assert "seen seen" in log and len(log) < 1 << 20
