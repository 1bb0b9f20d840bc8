"""A verification's room that is furnished once: its lab, keeper and reference are the ring's, only workers are fresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import Forward
from tideforge.engine.gates.probe import POISON
from tideforge.tasks.verify.idle import Idle
from tideforge.tasks.verify.seal import Seal
from tideforge.tasks.verify.trialled import Trialled


class Room(Trialled):
    def __init__(
        self, bench: Bench, candidate: Forward, noise: Callable[[], Sequence[float]], protected: Sequence[Path]
    ) -> None:
        self.bench, self.lab, self.events, self.reference = bench, bench.lab, bench.config.night, bench.reference
        self.incumbent, self.candidate, self.workload, self.bounds = (
            bench.incumbent, candidate, bench.workload, bench.bounds,
        )  # fmt: skip
        self.objective, self._noise = bench.config.objective, noise
        self.corpus = self.workload.corpus[len(self.workload.corpus) // 2 :]
        self.layers, self.settings = bench.layers, bench.settings
        self.arena = self.lab.arena("verify-candidate")
        self.arena.fill(POISON)
        self.answers_s = 0.0
        self.a, self._b, self.blocks, self.idle = bench.incumbent_worker, None, [], Idle(bench.settings.threads)
        folders = [forward.save(self.settings.state / "forwards") for forward in (self.incumbent, candidate)]
        self.seal = Seal.of([*protected, *folders])

    @property
    def noise(self) -> Sequence[float]:  # type: ignore[override]
        """Measured when it is first asked for: most cheats are caught before."""
        return self._noise()

    def close(self) -> None:
        for worker in (self._b, self.a):
            if worker is not None and worker is not self.bench.incumbent_worker:
                self.lab.release(worker)
