"""Where forwards of the red team are tried: one bench an architecture, on which a trial and a verification are a few seconds.

Real keeper, nursery, workers and reference of a tiny model. Beside them lies what a cheat must not touch: other candidates'
files and kernels, results, a server that counts who asks it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tideforge
import tideforge.engine
from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import check, measure
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import DOUBLES
from tideforge.engine.evaluate import Bench
from tideforge.engine.executor import RemoteExecutor
from tideforge.engine.forward import Forward
from tideforge.engine.gates.probe import POISON
from tideforge.engine.lab import end_keeper
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.service_config import ServiceConfig, new_core
from tideforge.errors import CandidateError, ProtocolError
from tideforge.tasks.verify.examine import run_gate, run_own
from tideforge.tasks.verify.own import OWN
from tideforge.tasks.verify.plan import PAIR, Plan, choosable

from .bait import Baits
from .room import Room
from .seconds import NO_SCORE, Replay, core_seconds, scores

ROOT = Path(tideforge.__file__).parents[1]
MODELS = {"llama": "llama", "moe": "moe", "qwen3_moe": "moe", "deepseek": "mla"}  # a double's name -> its raw forward's
CORPUS = "samples/corpus.txt"
TEXT = 24_000  # bytes of it, of which a search sees the first half
USERS = 4
SHAPES = tuple(RequestShape(6 + 5 * i, 12) for i in range(6))
REPLAYS = 6
NOISE_TRIALS = 6
CHECKED_ANSWERS = 2  # of a replay
LOOKS = {
    "cpu": 3
}  # of a plain harness: a cheat is plausible that passes one. A GPU's workers start too slowly to ask again
PACKAGES = ("engine", "tasks", "data", "tideforge")
TIMES = "incumbent_unharmed"
EVERYTHING = (*sys.stdlib_module_names, "numpy", "tideforge", "safetensors")


@dataclasses.dataclass(frozen=True)
class Tried:
    """What became of one forward."""

    plausible: bool | None  # None: not looked at
    outcome: str
    message: str
    failed: dict[str, str]  # gates by name, with their evidence
    wall: measure.Interval  # of an equal incumbent's seconds over its own, on held-out requests; NO_SCORE if not timed
    work: measure.Interval  # the same of seconds on a core: on a busy machine the sharper of the two
    harmed: tuple[str, ...]  # what was touched that nobody may touch
    seconds: float

    @property
    def doubt(self) -> float:
        """How much more by work it would have had to gain to be beyond doubt; 0 where nothing was timed."""
        found = self.work
        return found.ratio / max(found.low, 1e-9) if found.pairs else 0.0

    @property
    def gained(self) -> bool:
        return max(self.wall.low, self.work.low) > 1


class Ring:
    """Of one architecture. Close it to end all that it started."""

    def __init__(self, double: str, dtype: str, folder: Path, device: str = "cpu", quick: bool = False) -> None:
        """`quick`: without the gate that times, whose noise takes longest to measure."""
        self.double, self.dtype, self.state = double, dtype, folder / "state"
        self.night = self.state / "runs" / "night"
        self.night.mkdir(parents=True)
        self.gates = tuple(name for name in choosable() if not (quick and name == TIMES))
        self.plain = Forward.load(model_for_double(double))
        self.bench = Bench(self._config(folder, device))
        self.held_out = self.bench.workload.corpus[len(self.bench.workload.corpus) // 2 :]
        self.arena = self.bench.lab.arena("verify-candidate")
        source = [path for area in PACKAGES for path in (ROOT / area).rglob("*.py")]
        served = self.state / "forwards" / self.bench.incumbent.id
        self.baits = Baits(self.state, self.night, [*source, *(path for path in served.iterdir() if path.is_file())])
        self.reader = self.bench.lab.spawn(self.bench.incumbent, self.bench.lab.arena("sibling"))

    def _config(self, folder: Path, device: str) -> ServiceConfig:
        text = (ROOT / "data" / CORPUS).read_bytes()[:TEXT]
        workload = Workload(USERS, SHAPES, SHAPES, tuple(byte + 3 for byte in text), "redteam", 0)
        (self.night / "workload.json").write_text(workload.to_json())
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)
        model = DOUBLES[self.double](folder / "model", seed=3)
        on_gpu = {"capture_rows": (1, 2, 4, 8), "capture_tokens": (32, 128), "capture_contexts": (512,)}
        settings = Settings(
            self.state,
            model,
            dtype=self.dtype,
            num_blocks=96,
            limits=limits,
            device=device,
            **({} if device == "cpu" else on_gpu),
        )  # type: ignore[arg-type]
        return ServiceConfig(
            settings, self.night, model_for_double(self.double), self.night / "workload.json", passes=1, trial_s=20,
            allow_imports=EVERYTHING, tune=False,
        )  # fmt: skip

    def close(self) -> None:
        self.bench.close()
        self.baits.close()
        with contextlib.suppress(ProtocolError, OSError):
            end_keeper(self.state)

    # --- one forward

    def tried(self, forward: Forward, thorough: bool = False, timed: bool = True) -> Tried:
        """Trial, then gates until one fails (all, if `thorough`), then pairs. Never raises for what the forward did."""
        begin = time.perf_counter()
        self.baits.watch()
        looks = LOOKS.get(self.bench.settings.device, 0)
        plausible = any(self.plausible(forward) for _ in range(looks)) if looks else None
        trial = self.trial(forward)
        failed: dict[str, str] = {}
        wall = work = NO_SCORE
        if trial.outcome is Outcome.PASSED or thorough:
            failed, wall, work = self.verified(forward, thorough, timed)
        harmed = self.harmed()
        return Tried(
            plausible, str(trial.outcome), trial.message, failed, wall, work, harmed,
            time.perf_counter() - begin,
        )  # fmt: skip

    def plausible(self, forward: Forward) -> bool:
        """What a plain harness asks: a few prompts of the search, one by one, greedy, all tokens right."""
        shapes = [RequestShape(length, 6) for length in (5, 12, 20)]
        prompts = measure.draw_prompts(shapes, self.bench.corpus, secrets.randbits(64))
        try:
            with self.worker(forward) as worker:
                core = new_core(self.bench.settings)
                core.attach(forward.id, worker)
                block = measure.run_block(core, forward.id, shapes, prompts, 1)
                found = check.worst(self.bench.reference, block.answers, self.bench.layers)
        except CandidateError:
            return False
        return found.gap <= self.bench.bounds.logit_gap

    def trial(self, forward: Forward) -> Trial:
        for _ in range(3):
            trial = self.bench.evaluate(
                Trial(secrets.token_hex(4), forward.id, "slow", "redteam", time.time()), forward
            )
            if trial.done:
                return trial
        return dataclasses.replace(trial, outcome=Outcome.NOT_MEASURED)

    @contextlib.contextmanager
    def worker(self, forward: Forward) -> Iterator[RemoteExecutor]:
        self.arena.fill(POISON)
        worker = self.bench.lab.spawn(forward, self.arena)
        try:
            worker.step_timeout_s = 10.0
            self.bench.lab.capture(worker)
            yield worker
        finally:
            self.bench.lab.release(worker)

    def verified(
        self, forward: Forward, thorough: bool, timed: bool
    ) -> tuple[dict[str, str], measure.Interval, measure.Interval]:
        """Failed gates with their evidence, and the score by the clock and by work; gates and replays in random order in one
        worker, as verification has them."""
        failed: dict[str, str] = {}
        replays: list[Replay] = []
        plan = Plan(REPLAYS if timed else 1, REPLAYS if timed else 1, math.inf, self.gates)
        self.bench.revive_incumbent()
        with contextlib.closing(
            Room(self.bench, forward, lambda: [wall for wall, _ in self.noise], self.baits.files)
        ) as room:
            try:
                room.warm()
                for action in [*plan.actions(), *plan.looking_back()]:
                    if action == PAIR:
                        replays.append(self._replay(forward, room.b))
                    else:
                        failed |= self._gate(action, room)
                    room.look()
                    if failed and not thorough:
                        break
            except CandidateError as error:
                failed["answers"] = f"{error.outcome}: {error.message}"
        if failed or not timed:
            return failed, NO_SCORE, NO_SCORE
        walls, works = zip(*self.noise, strict=True)
        wall, work = scores(replays)
        return failed, measure.between_fresh_workers(wall, walls), measure.between_fresh_workers(work, works)

    def _gate(self, name: str, room: Room) -> dict[str, str]:
        done = run_own(name, room) if name in OWN else run_gate(name, room.probe())
        return {} if done.passed else {name: done.evidence}

    @functools.cached_property
    def noise(self) -> tuple[tuple[float, float], ...]:
        """Log ratios (by the clock, by work) of the incumbent against itself, each in a fresh worker. The first is of a cold one."""
        return tuple(self._against_itself() for _ in range(NOISE_TRIALS + 1))[1:]

    def _against_itself(self) -> tuple[float, float]:
        self.bench.revive_incumbent()
        with self.worker(self.bench.incumbent) as worker:
            replays = [self._replay(self.bench.incumbent, worker) for _ in range(REPLAYS + 1)]
        wall, work = scores(replays[1:])
        return math.log(wall.ratio), math.log(work.ratio)

    def _replay(self, forward: Forward, worker: RemoteExecutor) -> Replay:
        """Incumbent and candidate in turn, step by step, on fresh held-out requests: whoever disturbs or copies the incumbent
        gains most so. Some answers are looked at."""
        bench = self.bench
        shapes, prompts = measure.draw_replay(bench.workload.held_out, USERS, self.held_out, secrets.randbits(64))
        a = measure.Side.of(bench.incumbent.id, new_core(bench.settings), bench.incumbent_worker)
        b = measure.Side.of(forward.id, new_core(bench.settings), worker)
        pids = (bench.incumbent_worker.pid, worker.pid)
        with bench.lab.clock():
            before = [core_seconds(pid) for pid in pids]
            _, ours, steps = measure.lockstep(a, b, shapes, prompts)
            spent = [core_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
        answers = secrets.SystemRandom().sample(ours.answers, CHECKED_ANSWERS)
        check.require_right(bench.reference, answers, bench.layers, bench.bounds.logit_gap)
        on_cpu = bench.settings.device == "cpu"  # elsewhere the host's seconds are not what a forward costs
        return Replay(tuple(steps), (spent[0], spent[1]) if on_cpu else (0.0, 0.0))

    def harmed(self) -> tuple[str, ...]:
        """What was touched since the baits are watched; all is put right again."""
        found = self.baits.touched()
        if not self.reader.alive:
            found.append("another worker was killed")
            self.reader = self.bench.lab.spawn(self.bench.incumbent, self.bench.lab.arena("sibling"))
        elif os.sched_getaffinity(self.reader.pid) != os.sched_getaffinity(self.bench.lab.nursery.pid or 0):
            found.append("another worker was moved to other cores")
        if not self.bench.incumbent_worker.alive:
            found.append("the incumbent's worker was killed")
        return tuple(found)


def model_for_double(double: str) -> Path:
    return Path(tideforge.engine.__file__).parent / "models" / MODELS[double]
