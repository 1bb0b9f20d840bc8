"""The Triton attention against plain attention over the same pages: decodes with one and many splits, prefill chunks, mixtures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = Path(__file__).parents[2] / "engine" / "models" / "llama" / "paged_attention.py"


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("paged_attention_under_test", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(q, keys, values, batch):
    """One row after another, in fp64."""
    out = torch.empty_like(q)
    starts = batch.query_start_loc.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        mine = q[starts[row] : starts[row + 1]].double().transpose(0, 1)
        blocks = batch.block_tables[0][row].long()
        k = keys[blocks].flatten(0, 1)[:length].double().transpose(0, 1)
        v = values[blocks].flatten(0, 1)[:length].double().transpose(0, 1)
        count = mine.shape[1]
        seen = torch.arange(length, device=q.device) <= torch.arange(length - count, length, device=q.device)[:, None]
        heads = F.scaled_dot_product_attention(mine, k, v, attn_mask=seen, enable_gqa=True)
        out[starts[row] : starts[row + 1]] = heads.transpose(0, 1).to(q.dtype)
    return out


def case(lengths, queries, heads, kv_heads, dim, block_size, dtype, seed=0):
    torch.manual_seed(seed)
    width = max(-(-length // block_size) for length in lengths)
    order = torch.randperm(len(lengths) * width) + 1
    tables = torch.zeros(len(lengths), width + 2, dtype=torch.int32)
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        tables[row, :count] = order[row * width : row * width + count]
    shape = (len(lengths) * width + 1, block_size, kv_heads, dim)
    keys, values = torch.randn(shape), torch.randn(shape)
    keys[0] = values[0] = float("nan")  # the dummy page is never read
    q = torch.randn(sum(queries), heads, dim)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    batch = SimpleNamespace(
        block_tables=(tables.to(DEVICE),),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        query_start_loc=starts.to(DEVICE),
        num_prefills=sum(count > 1 for count in queries),
        max_query_len=max(queries),
        max_seq_len=1 << (max(lengths) - 1).bit_length(),
    )
    return q.to(DEVICE, dtype), keys.to(DEVICE, dtype), values.to(DEVICE, dtype), batch


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([1], [1]),
        ([5, 64, 65], [1, 1, 1]),
        ([700, 3, 256, 257], [1, 1, 1, 1]),  # several splits, some rows with one
        ([70, 7], [70, 7]),  # whole prompts
        ([300, 9, 130], [1, 1, 60]),  # decodes beside a chunk that follows earlier tokens
    ],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(4, 2, 16, 16), (4, 2, 24, 8), (9, 3, 64, 16), (32, 8, 64, 8)]
)
@pytest.mark.timeout(120)
def test_it_computes_what_plain_attention_does(kernels, lengths, queries, heads, kv_heads, dim, block_size):
    if DEVICE == "cpu" and heads == 32:
        pytest.skip("the interpreter takes minutes for it")
    q, keys, values, batch = case(lengths, queries, heads, kv_heads, dim, block_size, torch.float32)
    got, expected = kernels.paged_attention(q, keys, values, batch), plain(q, keys, values, batch)
    assert torch.isfinite(got).all()
    assert (got - expected).abs().max() < 2e-5
    if DEVICE == "cuda":
        q, keys, values = q.bfloat16(), keys.bfloat16(), values.bfloat16()
        got, expected = kernels.paged_attention(q, keys, values, batch), plain(q, keys, values, batch)
        assert (got.float() - expected.float()).abs().max() < 2e-2


@pytest.mark.timeout(120)
def test_long_chunks_are_computed_in_larger_pieces_alike(kernels, monkeypatch):
    """Tiles that all queries see wholly, tiles on the diagonal, and a row that is shorter than one piece."""
    monkeypatch.setattr(kernels, "LONG", 100)
    q, keys, values, batch = case([300, 9, 256], [150, 1, 256], 4, 2, 16, 16, torch.float32)
    got, expected = kernels.paged_attention(q, keys, values, batch), plain(q, keys, values, batch)
    assert (got - expected).abs().max() < 2e-5


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU on this machine")
@pytest.mark.parametrize("queries", [1, 1024, 1500])
def test_it_does_so_at_a_context_of_96k_tokens(kernels, queries):
    q, keys, values, batch = case([98_304], [queries], 4, 2, 64, 16, torch.bfloat16)
    got, expected = kernels.paged_attention(q, keys, values, batch), plain(q, keys, values, batch)
    assert torch.isfinite(got).all()
    assert (got.float() - expected.float()).abs().max() < 2e-3  # values average out: they are about 1e-2 themselves
