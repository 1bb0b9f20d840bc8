"""The same engine with its workers on a GPU. Skipped, with the reason printed, where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

import pytest
import torch

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.config import Settings
from tideforge.engine.doubles import tiny_deepseek, tiny_llama, tiny_moe
from tideforge.engine.evaluate import Bench
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.service_config import ServiceConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
MODELS = Path(__file__).parents[2] / "engine" / "models"
FAULTS = {
    Outcome.OUT_OF_MEMORY: "\n\ndef build(ctx):\n    return torch.empty(1 << 45, dtype=torch.uint8, device=ctx.device)\n",
    Outcome.NOT_FINITE: "\n\ndef build(ctx):\n    return lambda batch: batch.logits.fill_(float('nan'))\n",
    Outcome.FORWARD_ERROR: (
        "\n\ndef build(ctx):\n    bad = torch.full((4,), 1 << 40, device=ctx.device)\n"
        "    def forward(batch):\n        batch.logits[bad] = 0\n        torch.cuda.synchronize()\n    return forward\n"
    ),
}  # fmt: skip
ON_GRAPHS = {
    Outcome.CAPTURE_ERROR: (
        "\n\nplain = build\n\ndef build(ctx):\n    inner = plain(ctx)\n    def forward(batch):\n"
        "        batch.seq_lens.max().item()\n        inner(batch)\n    return forward\n"
    ),
    Outcome.HUNG: (
        "\n\nplain = build\n\ndef build(ctx):\n    inner = plain(ctx)\n    def forward(batch):\n"
        "        torch.cuda._sleep(1 << 60)\n        inner(batch)\n    return forward\n"
    ),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "make"), [("llama", tiny_llama), ("moe", tiny_moe), ("mla", tiny_deepseek)])
@pytest.mark.parametrize("graphs", [False, True])
def test_trials_on_a_gpu(name, make, graphs, tmp_path, end_keeper):
    model, state = make(tmp_path / "model"), tmp_path / "s"
    end_keeper(state)
    shapes = tuple(RequestShape(6 + i, 4) for i in range(8))
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    workload = Workload(users=8, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (tmp_path / "workload.json").write_text(workload.to_json())
    settings = Settings(state=state, model=model, num_blocks=64, device="cuda")
    if graphs:
        if name != "llama" and not (MODELS / name / "experts.py").exists():
            pytest.skip("this forward asks the host for lengths")
        limits = dataclasses.replace(settings.limits, decode_steps=16)
        settings = dataclasses.replace(
            settings, limits=limits, capture_rows=(8,), capture_tokens=(64,), capture_contexts=(64,), spares=2
        )
    config = ServiceConfig(settings, tmp_path, MODELS / name, tmp_path / "workload.json", passes=1)
    with contextlib.closing(Bench(config)) as bench:
        plain = bench.incumbent
        for outcome, text in {
            Outcome.PASSED: "\n# the same\n", **FAULTS, **(ON_GRAPHS if graphs else {})
        }.items():  # fmt: skip
            forward = plain.with_file("forward.py", plain.files["forward.py"] + text)
            begin = time.time()
            done = bench.evaluate(Trial("t", forward.id, "slow", "test", time.time()), forward)
            print(f"{name} {outcome}: {done.outcome} {done.message[:80]} {time.time() - begin:.2f} s {done.figures}")
            assert done.outcome is outcome, done.message
        after = Forward({**plain.files, "forward.py": plain.files["forward.py"] + "\n# after all that\n"})
        assert bench.evaluate(Trial("u", after.id, "slow", "test", time.time()), after).outcome is Outcome.PASSED
        assert bench.lab.weights_intact()
