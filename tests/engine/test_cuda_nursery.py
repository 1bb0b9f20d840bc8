"""Forked workers on a GPU. Skipped, with the reason printed, where there is none."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tideforge.engine import procfs
from tideforge.engine.config import Settings
from tideforge.engine.lab import Lab

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


@pytest.fixture
def gpu(tiny, tmp_path, end_keeper):
    lab = Lab(Settings(state=tmp_path / "s", model=tiny, num_blocks=64, device="cuda"))
    end_keeper(lab.settings.state)
    yield lab
    lab.close()


def devices(pid: int) -> list[str]:
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return [link for link in links if link.startswith("/dev/nvidia")]


def test_the_nursery_leaves_the_device_to_its_workers(gpu, plain):
    """`pytest -s` shows where a spare's time goes."""
    arena = gpu.arena("w")
    for _ in range(2):  # the second one waits for no import
        begin = time.perf_counter()
        worker = gpu.spare(arena)
        gpu.wait_ready(worker)
        parts = ", ".join(f"{name} {value:.3f}" for name, value in worker.attach_s.items())
        print(f"\nready after {time.perf_counter() - begin:.3f} s: {parts}")
        assert devices(worker.pid) and not devices(gpu.nursery.pid)
        assert procfs.threads(gpu.nursery.pid) == 1
        gpu.stage(worker, plain)
        gpu.release(worker)


def test_a_gpu_worker_dies_with_a_warden_that_was_killed(gpu):
    worker = gpu.spare(gpu.arena("w"))
    gpu.wait_ready(worker)
    with open(f"/proc/{worker.pid}/stat") as file:
        warden = int(file.read().rpartition(")")[2].split()[1])
    os.kill(warden, signal.SIGKILL)
    assert worker.ward.end().code is None
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{worker.pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker.pid}")
