"""The Triton mixture of experts against a loop over tokens in fp64: ragged counts, experts with none, odd sizes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = Path(__file__).parents[2] / "engine" / "models" / "moe" / "experts.py"


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("experts_under_test", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(x, weights, shares, chosen):
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (mine, parts) in enumerate(zip(chosen.tolist(), shares.double(), strict=True)):
        for expert, share in zip(mine, parts, strict=True):
            gate, up, down = (tensor.double() for tensor in weights[expert])
            row = x[token].double()
            out[token] += share * F.linear(F.silu(F.linear(row, gate)) * F.linear(row, up), down)
    return out


def case(tokens, k, count, hidden, width, dtype=torch.float32):
    """Expert 3 gets no token, expert 1 one of each."""
    torch.manual_seed(0)
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    weights = [tuple((torch.randn(size) / size[1] ** 0.5).to(DEVICE, dtype) for size in sizes) for _ in range(count)]
    scores = torch.rand(tokens, count)
    scores[:, 3], scores[:, 1] = -1.0, 2.0
    shares, chosen = scores.topk(k, dim=-1)
    return torch.randn(tokens, hidden).to(DEVICE, dtype), weights, shares.to(DEVICE, dtype), chosen.to(DEVICE)


LARGE = pytest.mark.skipif(DEVICE == "cpu", reason="minutes in the interpreter")
CASES = [
    (1, 2, 8, 48, 40),
    (40, 4, 64, 40, 24),
    (40, 2, 8, 64, 72),
    (150, 2, 6, 48, 40),  # tiles of 64 rows
    (2, 2, 4, 20, 12),  # rows that begin anywhere
    pytest.param(1, 8, 128, 2048, 768, marks=LARGE),
    pytest.param(300, 8, 128, 2048, 768, marks=LARGE),
]


@pytest.mark.parametrize(("tokens", "k", "count", "hidden", "width"), CASES)
@pytest.mark.timeout(120)
def test_it_computes_what_the_loop_does(kernels, tokens, k, count, hidden, width):
    x, weights, shares, chosen = case(tokens, k, count, hidden, width)
    got = kernels.Experts(weights)(x, shares, chosen)
    assert got.dtype == x.dtype
    assert (got - plain(x, weights, shares, chosen)).abs().max() < 2e-5
    if DEVICE == "cuda":
        x, weights, shares, chosen = case(tokens, k, count, hidden, width, torch.bfloat16)
        got, expected = kernels.Experts(weights)(x, shares, chosen), plain(x, weights, shares, chosen)
        assert (got - expected).abs().max() < 2e-2 * expected.abs().max()


def test_the_same_tokens_give_the_same_bits(kernels):
    x, weights, shares, chosen = case(9, 2, 8, 48, 40)
    mix = kernels.Experts(weights)
    assert torch.equal(mix(x, shares, chosen), mix(x, shares, chosen))


def test_weights_that_lie_anywhere_are_read_right(kernels):
    """A tensor may begin in the middle of another's 16 bytes."""
    x, weights, shares, chosen = case(3, 2, 4, 32, 16)
    odd = []
    for expert in weights:
        room = [torch.zeros(tensor.numel() + 1, device=DEVICE)[1:].view(tensor.shape) for tensor in expert]
        odd.append(tuple(space.copy_(tensor) for space, tensor in zip(room, expert, strict=True)))
    mix = kernels.Experts(odd)
    assert mix.align == 4 and kernels.Experts(weights).align == 16
    assert (mix(x, shares, chosen) - plain(x, weights, shares, chosen)).abs().max() < 2e-5


def test_weights_of_two_kinds_are_refused(kernels):
    x, weights, shares, chosen = case(3, 2, 4, 32, 16)
    with pytest.raises(AssertionError):
        kernels.Experts([*weights[:3], tuple(tensor.bfloat16() for tensor in weights[3])])
    with pytest.raises(AssertionError):
        kernels.Experts(weights)(x.bfloat16(), shares, chosen)
