"""The sampling gate: honest draws pass, and drawing otherwise is caught for its reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tideforge.engine import sampler
from tideforge.engine.forward import Forward
from tideforge.engine.gates.drawn import chi_square_limit, could_be, g_statistic, place, uniform
from tideforge.tasks.verify.sensitivity import Bench

Benches = Callable[[str, str], tuple[Bench, Forward]]
PATCH = "\n\nimport tideforge.engine.sampler as theirs\n{}\n"
PATCHES = {
    "always the likeliest": (
        "theirs.draw = lambda logits, heat, top_ps, uniform: logits.argmax(-1)", "does not draw from the row's logits"),
    "seeds do not matter": (
        "true = theirs.counter_uniform\ntheirs.counter_uniform = lambda seeds, places: true(seeds * 0, places)",
        "does not draw from the row's logits"),
    "nobody repeats": (
        "theirs.counter_uniform = lambda seeds, places: torch.rand(seeds.shape, dtype=torch.float64)", "the same seeds drew"),
    "top_p ignored": (
        "true = theirs.draw\ntheirs.draw = lambda logits, heat, top_ps, uniform: true(logits, heat, top_ps * 0 + 1, uniform)",
        "does not draw from the row's logits"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "moe", "deepseek"])
def test_raw_forwards_pass(name: str, dtype: str, benches: Benches) -> None:
    bench, raw = benches(name, dtype)
    assert bench.run(raw, ["sampling"]) == {"sampling": ""}


@pytest.mark.parametrize("name", PATCHES)
def test_another_way_to_draw_is_caught(name: str, benches: Benches) -> None:
    bench, raw = benches("llama", "float32")
    patch, evidence = PATCHES[name]
    cheat = raw.with_file("forward.py", raw.files["forward.py"] + PATCH.format(patch))
    assert evidence in bench.run(cheat, ["sampling"])["sampling"]


def test_sharpened_logits_do_not_follow_the_reference(benches: Benches) -> None:
    """The argmax is right, and each draw is what its row gives: only the distribution shows it."""
    bench, raw = benches("llama", "float32")
    source = raw.files["forward.py"].replace("F.linear(x, self.head))", "1.5 * F.linear(x, self.head))")
    assert "do not follow the reference" in bench.run(raw.with_file("forward.py", source), ["sampling"])["sampling"]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.sampled_from([1.0, 0.9, 0.3]), st.floats(0.2, 3))
def test_a_draw_recomputed_is_the_samplers(seed: int, position: int, top_p: float, temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed % 997).normal(size=50).astype(np.float32) * 3)
    share = sampler.counter_uniform(torch.tensor([seed]), torch.tensor([position]))
    assert share.item() == uniform(seed, position)
    ask = (torch.tensor([temperature], dtype=torch.float32), torch.tensor([top_p], dtype=torch.float32))
    token = int(sampler.draw(logits[None], *ask, share))
    heat, reach = float(ask[0]), float(ask[1])
    assert could_be(token, logits.numpy(), heat, reach, share.item())
    assert sum(could_be(other, logits.numpy(), heat, reach, share.item()) for other in range(50)) == 1


def test_places_fill_the_nucleus_without_gaps() -> None:
    logits = np.random.default_rng(3).normal(size=30)
    for top_p in (1.0, 0.7):
        parts = sorted(place(token, logits, 1.0, top_p) for token in range(30))
        inside = [part for part in parts if part[2] < top_p]
        assert inside[0][0] == 0 and inside[-1][1] == pytest.approx(1)
        np.testing.assert_allclose([p[1] for p in inside[:-1]], [p[0] for p in inside[1:]], atol=1e-12)


def test_the_test_of_a_distribution_keeps_its_false_alarms() -> None:
    rng = np.random.default_rng(0)
    limit = chi_square_limit(7, 1e-3)
    assert limit == pytest.approx(24.32, rel=0.02), "of 7 degrees, from a table"
    alarms = sum(g_statistic(rng.random(200), 8) > limit for _ in range(4000))
    assert alarms <= 16, "4 expected, and G of few draws is a little larger than chi-square"
    assert g_statistic(rng.random(200) ** 2, 8) > limit
