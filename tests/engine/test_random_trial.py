"""A trial on a model that lies on no disk: keeper, workers and reference each draw it, and agree."""

from __future__ import annotations

import contextlib
import time

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.evaluate import Bench
from tideforge.engine.lab import keeper_status
from tideforge.engine.model_config import model_for
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.random_weights import describe
from tideforge.engine.service_config import ServiceConfig

WRONG = "x = rms_norm(x[batch.logits_indices]"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("shape", ["llama-tiny", "moe-tiny", "mla-tiny"])
def test_a_trial_passes_and_a_wrong_forward_does_not(shape, tmp_path, end_keeper) -> None:
    model, state = describe(tmp_path / "model", shape), tmp_path / "s"
    end_keeper(state)
    shapes = tuple(RequestShape(6 + i, 6) for i in range(4))
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    workload = Workload(users=4, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (tmp_path / "workload.json").write_text(workload.to_json())
    settings = Settings(state=state, model=model, num_blocks=64)
    raw = model_for(ModelConfig.load(model).architecture)
    config = ServiceConfig(settings, tmp_path, raw, tmp_path / "workload.json", passes=1, tune=False)
    with contextlib.closing(Bench(config)) as bench:
        source = bench.incumbent.files["forward.py"]
        assert WRONG in source
        for outcome, text in (
            (Outcome.WRONG, source.replace(WRONG, "x = rms_norm(-x[batch.logits_indices]")),
            (Outcome.PASSED, source + "\n# the same\n"),
        ):
            forward = bench.incumbent.with_file("forward.py", text)
            done = bench.evaluate(Trial("t", forward.id, "slow", "test", time.time()), forward)
            assert done.outcome is outcome, done.message
        assert bench.lab.weights_intact()
    status = keeper_status(state)
    assert status is not None and status["loads"] == 1
    assert not list(model.glob("*.safetensors"))
