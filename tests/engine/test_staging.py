"""Into a worker and out of it again: compiled before its turn, and nobody charged for what another may have done."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import conduct, nvml, staging
from tideforge.engine.config import Settings
from tideforge.engine.dry import dry_run
from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import Forward
from tideforge.engine.ladder import Ladder
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.prepared import Prepared
from tideforge.engine.runner import GraphShape
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.staging import Staging
from tideforge.errors import CandidateError

LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"
DECODE = GraphShape(prefill=False, tokens=2, rows=2, context=16)
PREFILL = GraphShape(prefill=True, tokens=8, rows=2, context=16)


@pytest.fixture
def bench(tiny, tmp_path, end_keeper, monkeypatch):
    """A bench whose candidates are tried dry, which on the CPU runs them."""
    monkeypatch.setattr(Settings, "dry_shapes", property(lambda self: [dataclasses.astuple(DECODE)]))
    corpus, shapes = tuple((7 * i + i // 11) % 250 for i in range(2000)), (RequestShape(6, 4),) * 4
    workload = Workload(users=4, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (tmp_path / "workload.json").write_text(workload.to_json())
    end_keeper(tmp_path / "s")
    settings = Settings(state=tmp_path / "s", model=tiny, num_blocks=64)
    config = ServiceConfig(settings, tmp_path, LLAMA, tmp_path / "workload.json", passes=1, trial_s=8, tune=False)
    with contextlib.closing(Bench(config)) as made:
        yield made


def submit(bench: Bench, text: str) -> tuple[Trial, int]:
    """The trial, and how many workers it took."""
    taken = []
    take = bench.staging.spares.take

    def counted() -> Any:
        taken.append(take())
        return taken[-1]

    bench.staging.spares.take = counted  # type: ignore[method-assign]
    forward = bench.incumbent.with_file("forward.py", bench.incumbent.files["forward.py"] + text)
    done = bench.evaluate(Trial("t", forward.id, "slow", "test", time.time()), forward)
    bench.staging.spares.take = take  # type: ignore[method-assign]
    return done, len(taken)


def test_a_dry_run_that_fails_costs_a_worker_and_no_verdict(bench) -> None:
    done, workers = submit(bench, "\n# the same\n")
    assert (done.outcome, workers) == (Outcome.PASSED, 1) and done.dry_s > 0
    once = "\n_plain = build\n\ndef build(ctx):\n    inner = _plain(ctx)\n    def forward(batch):\n"
    small = "        if len(batch.input_ids) == 2 and not batch.positions.any():\n            raise ValueError('dry')\n"
    done, workers = submit(bench, f"{once}{small}        inner(batch)\n    return forward\n")
    assert (done.outcome, workers) == (Outcome.PASSED, 2), done.message
    done, workers = submit(bench, f"{once}        raise ValueError('always')\n    return forward\n")
    assert (done.outcome, workers) == (Outcome.FORWARD_ERROR, 2)
    done, workers = submit(bench, f"{once}        while True:\n            pass\n    return forward\n")
    assert (done.outcome, workers) == (Outcome.HUNG, 1) and "dry" in done.message
    free = bench.staging.spares._free
    assert len({id(arena) for arena in free}) == len(free) == 1 and bench.staging._live == {}


def test_what_a_forward_keeps_of_its_first_call_is_not_what_a_dry_run_left(bench) -> None:
    """As if weights were packed at the first call, which under a throwaway capture computes nothing."""
    keeps = "\n_plain = build\n\ndef build(ctx):\n    inner, kept = _plain(ctx), []\n    def forward(batch):\n"
    keeps += "        dry = len(batch.input_ids) == 2 and not batch.positions.any()\n        kept.append(%s)\n"
    keeps += "        inner(batch)\n        batch.logits.mul_(kept[0])\n    return forward\n"
    done, workers = submit(bench, keeps % "-1.0 if dry else 1.0")
    assert (done.outcome, workers) == (Outcome.PASSED, 2), done.message
    done, workers = submit(bench, keeps % "float('nan') if dry else 1.0")
    assert (done.outcome, workers) == (Outcome.PASSED, 2), done.message
    done, workers = submit(bench, keeps % "-1.0")
    assert (done.outcome, workers) == (Outcome.WRONG, 2)
    assert bench.staging._live == {}


@dataclasses.dataclass
class Rehearsing:
    """What dry_run asks of a runner."""

    device: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(type="cpu"))
    seen: list[GraphShape] = dataclasses.field(default_factory=list)

    def rehearse(self, shape: GraphShape) -> None:
        self.seen.append(shape)
        if shape.prefill:
            raise CandidateError("forward_error", "not under capture")


def test_a_dry_run_says_whether_all_shapes_could_be_captured() -> None:
    assert dry_run(Rehearsing(), [DECODE])  # type: ignore[arg-type]
    runner = Rehearsing()
    assert not dry_run(runner, [DECODE, PREFILL, DECODE])  # type: ignore[arg-type]
    assert runner.seen == [DECODE, PREFILL]


def test_dry_shapes_are_the_ends_of_what_is_captured(tmp_path: Path) -> None:
    settings = Settings(
        tmp_path, tmp_path, device="cuda", dry_runs=True,
        capture_rows=(1, 2, 8), capture_tokens=(16, 64), capture_contexts=(256,),
    )  # fmt: skip
    assert settings.dry_shapes == [(False, 1, 1, 256), (False, 8, 8, 256), (True, 16, 8, 256), (True, 64, 8, 256)]
    assert dataclasses.replace(settings, dry_runs=False).dry_shapes == []
    assert settings.ahead == 2 and dataclasses.replace(settings, device="cpu").ahead == 0


class Fakes:
    """A lab and spares for a Staging that starts nothing; `intact` is what the keeper says next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, night: Path) -> None:
        self.intact = True
        worker = SimpleNamespace(pid=1, ward=SimpleNamespace(census=lambda: None))
        spares = SimpleNamespace(
            take=lambda: worker, refill=lambda: None, restock=lambda: None, release=lambda worker: None
        )
        monkeypatch.setattr(staging, "Spares", lambda *_: spares)
        settings = SimpleNamespace(device="cpu", ahead=1, dry_shapes=[])
        self.lab: Any = SimpleNamespace(
            settings=settings, config=SimpleNamespace(num_hidden_layers=1), stage=lambda *_: 0.0,
            weights_intact=lambda: self.intact,
        )  # fmt: skip
        config: Any = SimpleNamespace(night=night, allow_imports=(), trial_s=1.0)
        self.staging = Staging(self.lab, config, {})

    def staged(self, name: str) -> Prepared:
        forward = Forward({"forward.py": f"# {name}\n"})
        prepared = Prepared(Trial(name, forward.id, "slow", "", 0.0), forward)
        self.staging.stage(prepared)
        return prepared


def test_whoever_lived_when_weights_were_written_is_suspect_unless_it_was_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fakes = Fakes(monkeypatch, tmp_path)
    before = fakes.staged("before")
    assert fakes.staging.release(before)
    first, second = fakes.staged("first"), fakes.staged("second")
    fakes.intact = False
    assert not fakes.staging.release(first)
    assert first.suspect and second.suspect and not before.suspect
    fakes.intact = True
    assert fakes.staging.release(second)
    alone = fakes.staged("alone")
    fakes.intact = False
    assert not fakes.staging.release(alone) and not alone.suspect


def test_a_suspect_has_no_outcome_whatever_was_seen_of_it() -> None:
    bench: Any = object.__new__(Bench)
    bench.lab = SimpleNamespace(sandbox="none")
    bench.settings, bench.ladder = SimpleNamespace(device="cuda"), Ladder()
    forward = Forward({"forward.py": ""})
    prepared = Prepared(Trial("a", forward.id, "slow", "", 0.0), forward, suspect=True)
    bench.staging = SimpleNamespace(release=lambda prepared: prepared.trial.id == "b")
    assert bench._end(prepared, Outcome.WRONG, "another token") == prepared.trial
    prepared.suspect = False
    assert bench._end(prepared, Outcome.WRONG, "another token").outcome is Outcome.WEIGHTS_WRITTEN


def test_memory_that_grows_on_a_gpu_is_told_from_what_a_first_pass_keeps() -> None:
    mib = 1 << 20
    kept = [(900 * mib, size * mib) for size in (500, 900, 900, 950)]
    conduct.require_steady_device(kept)
    leaks = [(900 * mib, (500 + 700 * index) * mib) for index in range(2)]
    with pytest.raises(CandidateError, match="700 MiB more of the GPU") as caught:
        conduct.require_steady_device(leaks)
    assert caught.value.outcome == Outcome.MEMORY_GREW
    conduct.require_steady_device([(own, own) for _, own in leaks])  # the incumbent does so too
    conduct.require_steady_device(leaks[:1])


class Driver:
    """libnvidia-ml of a machine with two GPUs, one of which holds two processes."""

    HELD: ClassVar = [[(11, 5 << 20), (12, 7 << 20)], [(12, 1 << 20), (13, nvml.UNKNOWN)]]

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.HELD)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, size: Any, processes: Any) -> int:
        held = self.HELD[device.value - 1]
        for one, (pid, used) in zip(processes, held, strict=False):
            one.pid, one.used = pid, used
        size._obj.value = len(held)
        return 0


def test_a_processs_memory_is_summed_over_the_gpus_and_unknown_where_it_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "_library", Driver)
    assert [nvml.device_bytes(pid) for pid in (11, 12, 13, 14)] == [5 << 20, 8 << 20, None, None]
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.device_bytes(11) is None
