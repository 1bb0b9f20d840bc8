"""A verification's room that is furnished once: its lab, keeper and reference are the ring's, only workers are fresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import Forward
from tideforge.tasks.verify.trialled import Trialled


class Room(Trialled):
    def __init__(
        self, bench: Bench, candidate: Forward, noise: Callable[[], Sequence[float]], protected: Sequence[Path]
    ) -> None:
        self.bench, self.lab, self.events, self.reference = bench, bench.lab, bench.config.night, bench.reference
        self.incumbent, self.candidate, self.workload, self.bounds = (
            bench.incumbent, candidate, bench.workload, bench.bounds,
        )  # fmt: skip
        self.objective, self._noise, self.settings = bench.config.objective, noise, bench.settings
        self._begin(protected)
        self.a = bench.incumbent_worker

    @property
    def noise(self) -> Sequence[float]:  # type: ignore[override]
        """Measured when it is first asked for: most cheats are caught before."""
        return self._noise()

    def close(self) -> None:
        for worker in (self._b, self.a):
            if worker is not None and worker is not self.bench.incumbent_worker:
                self.lab.release(worker)
