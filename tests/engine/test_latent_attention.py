"""The Triton attention over latents against plain attention over the same pages: one and many splits, chunks, mixtures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = Path(__file__).parents[2] / "engine" / "models" / "mla" / "latent_attention.py"


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("latent_attention_under_test", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(q, latents, parts, batch, scale):
    """One row after another, in fp64."""
    starts, out = batch.query_start_loc.tolist(), torch.empty_like(q[..., : latents.shape[-1]])
    for row, length in enumerate(batch.seq_lens.tolist()):
        mine = slice(starts[row], starts[row + 1])
        blocks = batch.block_tables[0][row].long()
        latent, part = (side[blocks].flatten(0, 1)[:length].double().transpose(0, 1) for side in (latents, parts))
        count = mine.stop - mine.start
        seen = torch.arange(length, device=q.device) <= torch.arange(length - count, length, device=q.device)[:, None]
        heads = F.scaled_dot_product_attention(
            q[mine].double().transpose(0, 1), torch.cat((latent, part), -1), latent, seen, scale=scale, enable_gqa=True
        )
        out[mine] = heads.transpose(0, 1).to(q.dtype)
    return out


def case(lengths, queries, heads, r, d, block_size):
    torch.manual_seed(0)
    width = max(-(-length // block_size) for length in lengths)
    tables = torch.zeros(len(lengths), width + 2, dtype=torch.int32)
    order = torch.randperm(len(lengths) * width).to(torch.int32) + 1
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        tables[row, :count] = order[row * width : row * width + count]
    latents, parts = (torch.randn(len(lengths) * width + 1, block_size, 1, size) for size in (r, d))
    latents[0] = parts[0] = float("nan")  # the dummy page is never read
    batch = SimpleNamespace(
        block_tables=(tables.to(DEVICE),),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).to(DEVICE, torch.int32),
        num_prefills=sum(count > 1 for count in queries),
        max_query_len=max(queries),
        max_seq_len=1 << (max(lengths) - 1).bit_length(),
    )
    return *(x.to(DEVICE) for x in (torch.randn(sum(queries), heads, r + d), latents, parts)), batch


LARGE = pytest.param(128, 512, 64, 16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="minutes in the interpreter"))


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([1], [1]),
        ([600, 3, 256, 257], [1, 1, 1, 1]),  # several splits, some rows with one
        ([37, 7], [37, 7]),  # whole prompts
        ([300, 9, 50], [1, 1, 20]),  # decodes beside a chunk that follows earlier tokens
    ],
)
@pytest.mark.parametrize(("heads", "r", "d", "block_size"), [(4, 32, 8, 4), (20, 24, 16, 16), LARGE])
@pytest.mark.timeout(120)
def test_it_computes_what_plain_attention_does(kernels, lengths, queries, heads, r, d, block_size):
    q, latents, parts, batch = case(lengths, queries, heads, r, d, block_size)
    scale = 1.3 * (r + d) ** -0.5
    got, expected = kernels.latent_attention(q, latents, parts, batch, scale), plain(q, latents, parts, batch, scale)
    assert torch.isfinite(got).all()
    assert (got - expected).abs().max() < 2e-5
    if DEVICE == "cuda":
        q, latents, parts = q.bfloat16(), latents.bfloat16(), parts.bfloat16()
        got = kernels.latent_attention(q, latents, parts, batch, scale)
        torch.testing.assert_close(got, plain(q, latents, parts, batch, scale), atol=2e-2, rtol=1e-2)
