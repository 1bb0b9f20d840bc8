"""Sampling depends on a row's logits, seed and position, and follows the distribution it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tideforge.engine.sampler import counter_uniform, sample


def args(n: int, temperature: float, top_p: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return (torch.full((n,), temperature), torch.full((n,), top_p), torch.full((n,), seed), torch.arange(n))


def logits(n: int, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(3))


def test_greedy_takes_the_largest() -> None:
    rows = logits(6)
    assert torch.equal(sample(rows, *args(6, 0.0)), rows.argmax(-1))


def test_a_row_with_nan_gives_minus_one_and_leaves_the_others() -> None:
    rows = logits(3)
    rows[1, 7] = float("nan")
    greedy = sample(rows, *args(3, 0.0))
    assert greedy[1] == -1 and greedy[0] == rows[0].argmax() and greedy[2] == rows[2].argmax()
    assert sample(rows, *args(3, 1.0))[1] == -1


def test_a_drawn_token_does_not_depend_on_the_batch() -> None:
    rows, full = logits(16), args(16, 0.9, 0.95, seed=11)
    together = sample(rows, *full)
    alone = [sample(rows[i : i + 1], *(a[i : i + 1] for a in full))[0] for i in range(16)]
    backwards = sample(rows.flip(0), *(a.flip(0) for a in full)).flip(0)
    assert together.tolist() == [int(token) for token in alone] == backwards.tolist()


def test_greedy_and_drawn_rows_mix() -> None:
    rows = logits(4)
    temperatures = torch.tensor([0.0, 1.0, 0.0, 1.0])
    mixed = sample(rows, temperatures, *args(4, 0)[1:])
    drawn = sample(rows, *args(4, 1.0))
    assert mixed.tolist() == [int(rows[0].argmax()), int(drawn[1]), int(rows[2].argmax()), int(drawn[3])]


def test_frequencies_follow_the_softmax() -> None:
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = sample(weights.log().repeat(20000, 1), *args(20000, 1.0, seed=5))
    shares = torch.bincount(tokens, minlength=4) / 20000
    assert torch.allclose(shares, weights, atol=0.015)  # four standard deviations of the largest share: 0.014


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    weights = torch.tensor([0.15, 0.5, 0.05, 0.3])
    many = weights.log().repeat(4000, 1)
    assert set(sample(many, *args(4000, 1.0, 0.79)).tolist()) == {1, 3}
    assert set(sample(many, *args(4000, 1.0, 0.81)).tolist()) == {0, 1, 3}
    assert set(sample(many, *args(4000, 1.0, 0.0)).tolist()) == {1}


def test_uniforms_are_spread_and_differ_by_seed_and_position() -> None:
    positions = torch.arange(4096)
    first, second = (counter_uniform(torch.full((4096,), seed), positions) for seed in (1, 2))
    assert float(first.min()) >= 0 and float(first.max()) < 1
    assert len(set(first.tolist()) | set(second.tolist())) == 8192
    counts = torch.histc(first.float(), bins=16, min=0, max=1)
    assert float(((counts - 256) ** 2 / 256).sum()) < 38  # chi-squared with 15 degrees of freedom, P = 0.001


def test_the_mixer_gives_splitmix64s_published_stream() -> None:
    from tideforge.engine.sampler import _mix

    # First output of SplitMix64 from state 0, as in the reference implementation by Vigna (prng.di.unimi.it).
    assert int(_mix(torch.tensor([0]))[0]) & ((1 << 64) - 1) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.9), (1.0, 1.0), (1.8, 0.3), (0.05, 0.99)])
def test_tokens_are_those_of_the_definition(temperature: float, top_p: float) -> None:
    """Each row by itself in numpy: sort, cut the nucleus, look the drawn share up."""
    rows = logits(64) * 2
    seeds, positions = torch.full((64,), 9), torch.arange(64)
    uniform = counter_uniform(seeds, positions).numpy()
    expected = []
    for row, share in zip(rows.double().numpy(), uniform, strict=True):
        order = np.argsort(-row, kind="stable")
        weights = np.exp((row[order] - row.max()) / temperature)
        weights /= weights.sum()
        kept = [True, *(np.cumsum(weights)[:-1] < top_p)]
        nucleus = np.cumsum(weights * kept)
        expected.append(order[np.searchsorted(nucleus, share * nucleus[-1], side="right")])
    drawn = sample(rows, torch.full((64,), temperature), torch.full((64,), top_p), seeds, positions)
    assert drawn.tolist() == expected


def test_on_a_gpu_nothing_depends_on_values_so_that_a_capture_can_hold_it(monkeypatch) -> None:
    """Tensors without values: whatever asks for one, or makes a shape of one, raises here as it would under capture."""
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(tensor) for tensor in (logits(4), *args(4, 0.7))]
        with pytest.raises(Exception, match="nonzero"):
            sample(*inputs)
        monkeypatch.setattr(FakeTensor, "is_cuda", True)
        assert sample(*inputs).shape == (4,)


def test_all_rows_at_once_are_drawn_as_some_are() -> None:
    """As on a GPU: rows that are greedy or hold NaN are drawn beside the others, and the draw is dropped."""
    rows = logits(6)
    rows[4, 3] = float("nan")
    settings = torch.tensor([0.0, 0.7, 1.1, 0.0, 0.9, 0.4]), *args(6, 0, 0.8, seed=4)[1:]
    few = sample(rows, *settings)

    class Device(torch.Tensor):
        is_cuda = True

    assert sample(rows.as_subclass(Device), *settings).tolist() == few.tolist()
    assert few[4] == -1 and few[0] == rows[0].argmax()
