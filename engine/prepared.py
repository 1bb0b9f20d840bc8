"""A candidate between its beginning and its outcome, and the seconds that each part of the way took."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Trial
from tideforge.engine.ward import Census


@dataclasses.dataclass
class Spent:
    """Seconds of each part of a trial, kept also when it fails in mid-way. outcome.Trial says what each of them is."""

    begin: float = dataclasses.field(default_factory=time.perf_counter)
    prepared: float = 0.0  # by the same clock
    queue_s: float = 0.0
    wait_s: float = 0.0
    stage_s: float = 0.0
    dry_s: float = 0.0
    lock_s: float = 0.0
    check_s: float = 0.0
    capture_s: float = 0.0
    swap_s: float = 0.0
    clock_s: float = 0.0
    gates_s: float = 0.0

    @property
    def parts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name.endswith("_s")}

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Adds what its body takes to a part, e.g. "check_s"."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - begin)


@dataclasses.dataclass
class Prepared:
    """A candidate staged in a worker of its own, or `done` when it failed before that."""

    trial: Trial
    forward: Forward
    spent: Spent = dataclasses.field(default_factory=Spent)
    worker: RemoteExecutor | None = None
    before: Census | None = None  # of the worker as a spare
    compiled: bool = False  # its kernels, by a dry run
    warm: bool = False  # checked eagerly, and its graphs captured
    device_bytes: list[tuple[int, int]] = dataclasses.field(
        default_factory=list
    )  # after each pass: incumbent's, its own
    suspect: bool = False  # somebody wrote the weights while it lived
    done: Trial | None = None

    @property
    def staged(self) -> RemoteExecutor:
        assert self.worker is not None
        return self.worker
