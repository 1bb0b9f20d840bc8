"""Logits arithmetic against values worked out by hand, and the derived bounds."""

from __future__ import annotations

import math

import numpy as np

from tideforge.engine import compare


def test_kl_by_hand() -> None:
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    np.testing.assert_allclose(compare.kl(p, q), [expected])
    np.testing.assert_allclose(compare.kl(p + 7, q - 3), [expected])  # logits are free up to a constant
    np.testing.assert_allclose(compare.kl(p, p), [0], atol=1e-15)


def test_kl_survives_large_logits_and_shows_nan() -> None:
    large = np.array([[1e4, 0.0], [0.0, 1e4]], np.float32)
    assert np.isfinite(compare.kl(large, large)).all()
    assert np.isnan(compare.kl(large, np.full_like(large, np.nan))).all()


def test_top1_agreement() -> None:
    a = np.array([[1.0, 0.0], [0.0, 1.0], [3.0, 2.0], [0.0, 5.0]])
    b = np.array([[2.0, 0.0], [1.0, 0.0], [3.0, 2.0], [0.0, 1.0]])
    assert compare.top1_agreement(a, b) == 0.75


def test_violations_are_rows_beyond_the_gap_or_not_finite() -> None:
    reference = np.array([[1.0, 0.9], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    candidate = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [np.nan, 0.0]])
    assert compare.top1_violations(reference, candidate, gap=0.2).tolist() == [1, 3]


def test_noise_takes_the_worst_of_the_runs_and_bounds_scale_it() -> None:
    rng = np.random.default_rng(0)
    base = (rng.normal(size=(4, 9)), rng.normal(size=(2, 4, 1, 3)), rng.normal(size=(2, 4, 1, 3)))
    runs = []
    for size in (0.001, 0.002):
        moved = tuple(part.copy() for part in base)
        moved[0][2, 3] += size
        moved[1][1, 0, 0, 0] -= size
        moved[2][0, 3, 0, 1] += 2 * size
        runs.append(moved)
    noise = compare.measure("float32", base, runs)
    np.testing.assert_allclose(noise.logit_max, 0.002)
    np.testing.assert_allclose(noise.key_max, (0, 0.002), atol=1e-15)
    np.testing.assert_allclose(noise.value_max, (0.004, 0), atol=1e-15)
    found = compare.bounds(noise, safety=3)
    np.testing.assert_allclose(found.logit_gap, 2 * 3 * 0.002)
    np.testing.assert_allclose(found.key, (0, 0.006), atol=1e-15)
    np.testing.assert_allclose(found.kl_max, 9 * noise.kl_max)
    assert noise.kl_max > noise.kl_mean > 0
