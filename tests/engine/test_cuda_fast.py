"""The fast tier with its workers on a GPU, and every honest variant there. Skipped, with the reason printed, where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.bench.variants import honest
from tideforge.engine.config import Settings
from tideforge.engine.doubles import tiny_llama, tiny_moe
from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import FAST, Outcome, Trial
from tideforge.engine.service_config import ServiceConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
MODELS = Path(__file__).parents[2] / "engine" / "models"


@contextlib.contextmanager
def open_bench(name: str, make: Callable[..., Path], folder: Path, noise_trials: int) -> Iterator[Bench]:
    model, state = make(folder / "model", layers=6), folder / "s"
    state.mkdir()
    shapes = tuple(RequestShape(6 + i, 24) for i in range(8))
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    workload = Workload(users=8, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (folder / "workload.json").write_text(workload.to_json())
    settings = Settings(state=state, model=model, num_blocks=64, device="cuda", spares=2)
    limits = dataclasses.replace(settings.limits, decode_steps=16)
    settings = dataclasses.replace(
        settings, limits=limits, capture_rows=(8,), capture_tokens=(64,), capture_contexts=(64,)
    )
    config = ServiceConfig(
        settings, folder, MODELS / name, folder / "workload.json", passes=1, tune=False, noise_trials=noise_trials
    )
    with contextlib.closing(Bench(config)) as bench:
        yield bench


def fast(bench: Bench, forward: Forward) -> Trial:
    return bench.evaluate(Trial("t", forward.id, FAST, "test", time.time()), forward)


@pytest.mark.timeout(300)
def test_a_slower_layer_shows_and_the_floor_is_kept(tmp_path, end_keeper) -> None:
    end_keeper(tmp_path / "s")
    with open_bench("llama", tiny_llama, tmp_path, noise_trials=2) as bench:
        source = bench.incumbent.files["forward.py"]
        same = fast(bench, bench.incumbent.with_file("forward.py", source + "\n# the same\n"))
        assert same.outcome is Outcome.PASSED, same.message
        assert same.capture_s > 0 and same.swap_s > same.capture_s
        noise = json.loads((tmp_path / "fast-noise.json").read_text())
        assert len(noise["log_ratios"]) == 2 and noise["depths"] == [1, 3]
        call = "slots: Tensor, spans: list[Span] | Batch) -> Tensor:\n"
        waste = "        for _ in range(100):\n            x = x + 0\n"
        slow = fast(bench, bench.incumbent.with_file("forward.py", source.replace(call, call + waste, 1)))
        assert slow.outcome is Outcome.PASSED and slow.figures.ci_high < 0.7, (slow.message, slow.figures)
        wrong = source.replace("return x + self.mlp(", "return x + 1.5 * self.mlp(")
        assert fast(bench, bench.incumbent.with_file("forward.py", wrong)).outcome is Outcome.WRONG
        bench._fast_tier().incumbent.kill()
        again = fast(bench, bench.incumbent.with_file("forward.py", source + "\n# after a death\n"))
        assert again.outcome is Outcome.PASSED, again.message


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "make"), [("llama", tiny_llama), ("moe", tiny_moe)])
def test_every_honest_variant_passes_under_capture(name, make, tmp_path, end_keeper) -> None:
    end_keeper(tmp_path / "s")
    with open_bench(name, make, tmp_path, noise_trials=0) as bench:
        for variant, forward in honest(bench.incumbent):
            done = fast(bench, forward)
            print(f"{name} {variant}: {done.outcome} {done.message[:80]} {done.figures}")
            assert done.outcome is Outcome.PASSED, f"{variant}: {done.message}"
