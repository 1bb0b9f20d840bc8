"""Candidates that live at once share no pages, and nobody finds what another left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.config import Limits, Settings
from tideforge.engine.service_config import for_bench, in_runs
from tideforge.engine.spares import Spares


@pytest.fixture
def spares(lab, tmp_path):
    made = Spares(lab, 2, tmp_path)
    yield made
    for worker in list(lab._workers):
        lab.release(worker)


def test_workers_under_way_have_arenas_of_their_own(lab, spares) -> None:
    first, second = spares.take(), spares.take()
    spares.refill()
    arenas = [first.arena, second.arena, *(worker.arena for worker in spares._waiting)]
    assert len({id(arena) for arena in arenas}) == len({os.fstat(arena.fds[0]).st_ino for arena in arenas}) == 3
    assert spares._free == []
    pages = np.frombuffer(first.arena._map, np.uint8)
    pages[: first.arena.layout.pages_bytes] = 7
    assert (second.arena.plane(0).view(np.uint8) == 0xFF).all()
    spares.release(first)
    assert (pages[: first.arena.layout.pages_bytes] == 0xFF).all()
    assert spares._free == [first.arena] and not first.alive


def test_a_spare_that_died_is_replaced(spares) -> None:
    spares.refill()
    dead = spares._waiting[0]
    os.kill(dead.pid, signal.SIGKILL)
    worker = spares.take()
    assert worker.alive and worker is not dead
    assert len(spares._free) + len(spares._waiting) + 1 == 3


def test_arenas_of_a_bench_hold_the_workload_and_no_server(tiny: Path, tmp_path: Path) -> None:
    shapes = (RequestShape(20, 10), RequestShape(40, 9))
    workload = Workload(users=3, search=shapes[:1], held_out=shapes[1:], corpus=(), profile="", seed=0)
    settings = Settings(state=tmp_path, model=tiny, num_blocks=4096)
    assert for_bench(settings, workload).num_blocks == 2 * 3 * (4 + 1) + 1
    assert for_bench(dataclasses.replace(settings, num_blocks=9), workload).num_blocks == 9


class Gpu:
    """A lab whose workers start at once; it notes whether the clock was held meanwhile."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(device="cuda", spares=3)
        self.held, self.starts = False, []

    def arena(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, fill=lambda value: None)

    def spare(self, arena: SimpleNamespace, clock_held: bool) -> SimpleNamespace:
        self.starts.append((self.held, clock_held))
        return SimpleNamespace(arena=arena, alive=True, ready=False)

    def wait_ready(self, worker: SimpleNamespace) -> None:
        assert worker.ready or self.held
        worker.ready = True

    def release(self, worker: SimpleNamespace) -> None:
        worker.alive = False

    @contextlib.contextmanager
    def clock(self):
        assert not self.held, "a lock is taken once"
        self.held = True
        yield
        self.held = False


def test_on_a_gpu_spares_start_together_under_the_clock_when_none_is_left(tmp_path: Path) -> None:
    lab = Gpu()
    spares = Spares(lab, 1, tmp_path)
    spares.refill()
    assert lab.starts == [], "nothing starts beside a clock"
    taken = [spares.take() for _ in range(3)]
    assert lab.starts == [(True, True)] * 3
    with lab.clock():
        spares.release(taken[0])
        spares.restock()
    assert len(lab.starts) == 5 and len(spares._waiting) == 2, "two arenas are still taken, so two more may start"
    with lab.clock():
        spares.restock()
    assert len(lab.starts) == 5, "some are left"


def test_a_run_of_decodes_fills_a_block_and_no_more(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path, model=tmp_path, limits=Limits(decode_steps=32))
    runs = [in_runs(settings, seconds).limits.decode_steps for seconds in (0.0001, 0.0017, 0.0145, 0.06)]
    assert runs == [32, 30, 4, 1]
    assert in_runs(dataclasses.replace(settings, limits=Limits()), 0.001).limits.decode_steps == 1
