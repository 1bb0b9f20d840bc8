"""Quality gates pass the raw forwards at every precision and fail for the right reason on faults of a stated size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tideforge.engine.compare import Spread
from tideforge.engine.forward import Forward
from tideforge.engine.gates.long import AFFORDED, NEEDLE, longest, needles
from tideforge.engine.gates.quality import OPTIONS, QUESTIONS, likelihoods
from tideforge.tasks.verify.faults import FAULTS
from tideforge.tasks.verify.sensitivity import Bench

GATES = ("quality", "task_score", "long_context")
Benches = Callable[[str, str], tuple[Bench, Forward]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "moe", "deepseek"])
def test_raw_forwards_pass(name: str, dtype: str, benches: Benches) -> None:
    bench, raw = benches(name, dtype)
    assert bench.run(raw, GATES) == dict.fromkeys(GATES, "")


@pytest.mark.parametrize(
    ("name", "dtype", "fault", "size", "gate", "evidence"),
    [
        ("llama", "float32", "layer scaled", 2**-12, "quality", "KL of"),
        ("llama", "bfloat16", "layer scaled", 2**-3, "quality", "KL of"),
        ("deepseek", "float32", "head scaled", 2**-10, "quality", "KL of"),
        ("moe", "float32", "expert scaled", 2**-10, "quality", "KL of"),
        ("moe", "bfloat16", "expert scaled", 1.0, "quality", "KL of"),
        ("llama", "float32", "weights rounded", 9, "quality", "times that of the reference's own orders"),
        ("llama", "float32", "keys forgotten", 128, "long_context", "tokens"),
        ("llama", "bfloat16", "keys forgotten", 32, "long_context", "needle"),
    ],
)
def test_a_fault_is_caught_for_its_reason(
    name: str, dtype: str, fault: str, size: float, gate: str, evidence: str, benches: Benches
) -> None:
    bench, raw = benches(name, dtype)
    forward = FAULTS[fault].of(raw, size)
    assert forward is not None
    said = bench.run(forward, [gate])[gate]
    assert evidence in said or "is on top" in said, said


def test_the_least_likely_endings_are_not_the_references_choice(benches: Benches) -> None:
    bench, raw = benches("llama", "float32")
    source = raw.files["forward.py"].replace("copy_(F.linear(x, self.head))", "copy_(-F.linear(x, self.head))")
    said = bench.run(raw.with_file("forward.py", source), ["task_score"])["task_score"]
    assert said.startswith("question ") and "the reference prefers" in said, said


def test_a_spread_shows_nan_and_its_ratios_are_to_the_largest_order() -> None:
    rng = np.random.default_rng(0)
    values = rng.random(100)
    orders = [Spread.of(values / 2), Spread.of(values / 4)]
    assert Spread.of(values).over(orders) == pytest.approx(dict.fromkeys(("median", "mean", "p99", "max"), 2.0))
    values[3] = np.nan
    assert all(np.isnan(ratio) for ratio in Spread.of(values).over(orders).values())
    zero = Spread.of(np.zeros(4))
    assert set(zero.over([zero]).values()) == {0.0} and set(orders[0].over([zero]).values()) == {np.inf}


def test_long_context_is_the_traffics_as_far_as_it_is_afforded(benches: Benches) -> None:
    bench, raw = benches("llama", "float32")
    with bench.probe(raw) as probe:
        assert longest(probe) == 512 < AFFORDED, "as many as a sequence may have"
        assert longest(dataclasses.replace(probe, context=300)) == 300
        assert longest(dataclasses.replace(probe, context=10**6)) == 512
        (one, other), far = needles(probe, 300)
    assert len(one) == len(other) == 300 and one[-NEEDLE:] == other[-NEEDLE:]
    differs = [index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    assert differs and 300 - far - NEEDLE <= differs[0] and differs[-1] < 300 - far and far > 150


def test_likelihoods_add_up_an_endings_tokens() -> None:
    spans = [tuple(range(32))] * (QUESTIONS * OPTIONS)
    logits = np.zeros((QUESTIONS * OPTIONS * 8, 40))
    np.testing.assert_allclose(likelihoods(spans, logits), -8 * np.log(40))
