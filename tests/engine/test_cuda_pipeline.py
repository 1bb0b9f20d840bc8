"""Dry runs, candidates prepared beside one that is measured, and further devices. Skipped where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

import pytest
import torch

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import nvml, timing
from tideforge.engine.bench.trials import KERNEL
from tideforge.engine.config import Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.dry import dry_run
from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import Forward
from tideforge.engine.lab import kernels_of
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.runner import GraphShape, Runner
from tideforge.engine.service_config import ServiceConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"
SHAPES = [GraphShape(False, 1, 1, 16), GraphShape(True, 8, 2, 16)]
LEAKS = (
    "\n\nplain = build\nkept = []\n\ndef build(ctx):\n    inner = plain(ctx)\n    def forward(batch):\n"
    "        if not torch.cuda.is_current_stream_capturing():\n"
    "            kept.append(torch.empty(512 << 20, dtype=torch.uint8, device=ctx.device))\n"
    "        inner(batch)\n    return forward\n"
)


@contextlib.contextmanager
def opened(folder: Path, end_keeper, passes: int = 1, **changes):
    model, state = tiny_llama(folder / "model"), folder / "s"
    end_keeper(state)
    shapes = tuple(RequestShape(6 + i, 4) for i in range(8))
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    workload = Workload(users=8, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (folder / "workload.json").write_text(workload.to_json())
    settings = Settings(
        state=state, model=model, num_blocks=64, device="cuda", capture_rows=(8,), capture_tokens=(64,),
        capture_contexts=(64,), spares=2, dry_runs=True,
    )  # fmt: skip
    settings = dataclasses.replace(settings, **changes)
    config = ServiceConfig(
        settings, folder, LLAMA, folder / "workload.json", passes=passes, allow_imports=("swiglu",), tune=False
    )
    with contextlib.closing(Bench(config)) as bench:
        yield bench


def variant(bench: Bench, text: str) -> Forward:
    return bench.incumbent.with_file("forward.py", bench.incumbent.files["forward.py"] + text)


def trial(forward: Forward) -> Trial:
    return Trial(forward.id[:8], forward.id, "slow", "test", time.time())


def test_a_dry_run_launches_nothing_and_says_what_cannot_be_captured() -> None:
    device = torch.device("cuda")
    torch.cuda.set_stream(torch.cuda.Stream(device))
    counter = torch.zeros(1, device=device)

    def counts(batch) -> None:
        counter.add_(1)
        batch.logits.zero_()

    runner = Runner(counts, torch.zeros(4, 32, device=device), 16)
    held = torch.cuda.memory_reserved()
    assert dry_run(runner, SHAPES)
    torch.cuda.synchronize()
    assert counter.item() == 0
    runner.rehearse(SHAPES[0])
    assert counter.item() == 1
    assert torch.cuda.memory_reserved() - held < 64 << 20
    assert not dry_run(Runner(lambda batch: batch.seq_lens.max().item(), torch.zeros(4, 32, device=device), 16), SHAPES)
    assert torch.ones(4, device=device).sum().item() == 4, "the device stays usable"


@pytest.mark.timeout(300)
def test_candidates_compile_while_another_is_measured(tmp_path, end_keeper) -> None:
    with opened(tmp_path, end_keeper) as bench:
        text = bench.incumbent.files["forward.py"]
        call = "F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)"
        assert call in text
        text = text.replace(call, "swiglu(F.linear(x, self.gate_proj), F.linear(x, self.up_proj))")
        text = text.replace("from torch import Tensor\n", "from torch import Tensor\n\nfrom swiglu import swiglu\n", 1)
        new = bench.incumbent.with_file("forward.py", text).with_file("swiglu.py", KERNEL.format(index=7))
        same = variant(bench, "\n# the same\n")
        with bench.lab.clock():  # as while a trial is timed: preparing needs no clock
            prepared = [bench.prepare(trial(forward), forward) for forward in (new, same)]
        assert all(one.done is None and one.spent.dry_s > 0 for one in prepared), [one.done for one in prepared]
        assert list(kernels_of(prepared[0].staged).rglob("*_swiglu_7*")), "the new kernel is compiled before its turn"
        assert prepared[0].staged.arena is not prepared[1].staged.arena
        done = [bench.measure(one) for one in prepared]
        assert [one.outcome for one in done] == [Outcome.PASSED] * 2, [one.message for one in done]
        print([(one.swap_s, one.stage_s, one.dry_s, one.lock_s, one.check_s, one.capture_s) for one in done])
        asks = "\n\nplain = build\n\ndef build(ctx):\n    inner = plain(ctx)\n    def forward(batch):\n"
        asks += "        batch.seq_lens.max().item()\n        inner(batch)\n    return forward\n"
        forward = variant(bench, asks)
        assert bench.evaluate(trial(forward), forward).outcome is Outcome.CAPTURE_ERROR


@pytest.mark.timeout(300)
def test_memory_that_grows_on_the_device_is_an_outcome(tmp_path, end_keeper, monkeypatch) -> None:
    monkeypatch.setattr(timing, "HOPELESS", 0.0)  # an allocation takes its time
    with opened(tmp_path, end_keeper, passes=6, capture_rows=(), capture_tokens=(), capture_contexts=()) as bench:
        if nvml.device_bytes(bench.incumbent_worker.pid) is None:
            pytest.skip("NVML does not show our processes here")
        forward = variant(bench, LEAKS)
        done = bench.evaluate(trial(forward), forward)
        assert done.outcome is Outcome.MEMORY_GREW, (done.outcome, done.message)


@pytest.mark.timeout(300)
def test_a_second_device_is_as_good_as_the_first(tmp_path, end_keeper) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU on this machine")
    with opened(tmp_path, end_keeper, device="cuda:1") as bench:
        forward = variant(bench, "\n# the same\n")
        done = bench.evaluate(trial(forward), forward)
        assert done.outcome is Outcome.PASSED, done.message
        assert done.environment["device"] == "cuda:1" and bench.lab.weights_intact()
