"""The reference against transformers, the process it lives in, and the noise that the bounds are derived from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tideforge.engine import compare, doubles
from tideforge.engine.arithmetic import Reordered
from tideforge.engine.reference import ORDERS, Reference, measure_noise
from tideforge.engine.reference_model import ReferenceModel
from tideforge.errors import ProtocolError, UserError

SMOLLM2 = Path(__file__).parents[2] / ".models" / "smollm2-135m-instruct"
FAMILIES = doubles.DOUBLES
TOKENS = np.random.default_rng(3).integers(3, doubles.VOCAB, 40).tolist()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=5, layers=3)


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    reference = Reference.start(folder, tmp_path_factory.mktemp("state"))
    yield reference
    reference.close()


def by_transformers(folder: Path, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        out = model(torch.tensor([tokens]), use_cache=True)
    layers = out.past_key_values.layers
    keys, values = (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in layers]) for name in ("keys", "values")
    )
    return out.logits[0].numpy(), keys.numpy(), values.numpy()


def test_model_matches_transformers(folder: Path) -> None:
    result = ReferenceModel(folder).forward(TOKENS)
    for ours, theirs in zip(result, by_transformers(folder, TOKENS), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=3e-5, rtol=0)


def test_process_answers_as_the_model(folder: Path, reference: Reference) -> None:
    result = ReferenceModel(folder).forward(TOKENS)
    np.testing.assert_allclose(reference.logits(TOKENS), result.logits.numpy(), atol=1e-5)
    np.testing.assert_allclose(reference.logits(TOKENS, [7, 2]), result.logits.numpy()[[7, 2]], atol=1e-5)
    keys, values = reference.kv(TOKENS)
    np.testing.assert_allclose(keys, result.keys.numpy(), atol=1e-5)
    np.testing.assert_allclose(values, result.values.numpy(), atol=1e-5)


def test_score_is_teacher_forced_on_the_chain(reference: Reference) -> None:
    logits = reference.logits(TOKENS)
    maximum, emitted, argmax = reference.score(TOKENS, 30)
    np.testing.assert_allclose(maximum, logits[29:39].max(1), atol=1e-5)
    np.testing.assert_allclose(emitted, [logits[29 + i, TOKENS[30 + i]] for i in range(10)], atol=1e-5)
    assert argmax.tolist() == logits[29:39].argmax(1).tolist()


def test_layer_range_of_the_process(folder: Path, reference: Reference) -> None:
    keys, _ = reference.kv(TOKENS, range(1))
    assert keys.shape[0] == 1
    expected = ReferenceModel(folder).forward(TOKENS, None, range(1)).logits.numpy()
    np.testing.assert_allclose(reference.logits(TOKENS, None, range(1)), expected, atol=1e-5)
    assert np.abs(expected - reference.logits(TOKENS)).max() > 0.1


def test_a_bad_question_does_not_end_the_process(reference: Reference) -> None:
    with pytest.raises(ProtocolError, match="reference"):
        reference.logits([10**6])
    assert reference.logits(TOKENS[:2]).shape == (2, doubles.VOCAB)
    with pytest.raises(ValueError, match="score"):
        reference.score(TOKENS, 0)


def test_a_missing_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        Reference.start(tmp_path)


def test_closing_ends_the_process(folder: Path) -> None:
    reference = Reference.start(folder)
    reference.close()
    assert reference.process.returncode is not None


def test_reordered_sums_are_the_same_sums() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 300, dtype=torch.float32), torch.randn(300, 7)
    arithmetic = Reordered(torch.float32, seed=1)
    exact = (a.double() @ b.double()).float()
    torch.testing.assert_close(arithmetic.matmul(a, b), exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(arithmetic.matmul(a.expand(2, 5, 300), b.expand(2, 300, 7))[1], exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(arithmetic.mean_square(a), a.pow(2).mean(-1, keepdim=True))
    covered = sorted(i for part in arithmetic.blocks(300) for i in range(300)[part])
    assert covered == list(range(300))


def test_noise_grows_with_lost_precision_and_never_vanishes(folder: Path) -> None:
    model = ReferenceModel(folder)
    fine, coarse = (measure_noise(model, dtype, TOKENS, None) for dtype in ("float32", "bfloat16"))
    assert 0 < fine.logit_max < 1e-3 < coarse.logit_max
    assert 0 < max(fine.key_max) < max(coarse.key_max)
    assert fine.kl_mean < coarse.kl_mean
    assert fine.rows == len(TOKENS) and len(fine.key_max) == 3


def test_bound_admits_another_order_and_refuses_a_lost_layer(folder: Path, reference: Reference) -> None:
    model = ReferenceModel(folder)
    bound = reference.bound("float32", TOKENS)
    base = reference.logits(TOKENS)
    other = model.forward(TOKENS, arithmetic=Reordered(torch.float32, seed=99)).logits.numpy()
    assert compare.top1_violations(base, other, bound).size == 0
    short = model.forward(TOKENS, layers=range(2)).logits.numpy()
    assert compare.top1_violations(base, short, bound).size > 5
    rounded = model.forward(TOKENS, arithmetic=Reordered(torch.bfloat16, seed=99)).logits.numpy()
    assert compare.kl(base, rounded).mean() > reference.bounds("float32", TOKENS).kl_mean


def test_smollm2_reference_matches_transformers() -> None:
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip(f"{SMOLLM2} is absent: run `tideforge weights`")
    tokens = np.random.default_rng(4).integers(17, 49152, 24).tolist()
    result = ReferenceModel(SMOLLM2).forward(tokens)
    for ours, theirs in zip(result, by_transformers(SMOLLM2, tokens), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-3, rtol=0)


LENGTHS = (23, 9, 31)


def test_sequences_computed_together_are_computed_each_by_itself(folder: Path) -> None:
    model = ReferenceModel(folder)
    rng = np.random.default_rng(6)
    sequences = [rng.integers(3, doubles.VOCAB, length).tolist() for length in LENGTHS]
    together = model.together(sequences)
    apart = [model.forward(sequence) for sequence in sequences]
    torch.testing.assert_close(together.logits, torch.cat([one.logits for one in apart]), atol=3e-5, rtol=0)
    for name in ("keys", "values"):
        expected = torch.cat([getattr(one, name) for one in apart], dim=1)
        torch.testing.assert_close(getattr(together, name), expected, atol=3e-5, rtol=0)


def test_chains_scored_together_are_scored_each_by_itself(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    chains = [
        (rng.integers(3, doubles.VOCAB, length).tolist(), start)
        for length, start in zip(LENGTHS, (4, 8, 30), strict=True)
    ]
    for tokens_at_once in (2048, 40, 5):  # all, the first two and the last, one by one
        monkeypatch.setattr("tideforge.engine.reference.TOGETHER", tokens_at_once)
        found = reference.scores(chains)
        assert len(found) == 3
        for (tokens, start), (maximum, emitted, argmax) in zip(chains, found, strict=True):
            logits = reference.logits(tokens)[start - 1 : -1]
            np.testing.assert_allclose(maximum, logits.max(1), atol=3e-5)
            np.testing.assert_allclose(
                emitted, np.take_along_axis(logits, np.array(tokens[start:])[:, None], 1)[:, 0], atol=3e-5
            )
            assert argmax.tolist() == logits.argmax(1).tolist()
    assert reference.scores([]) == []


def test_experts_upcast_a_few_at_a_time_are_the_same_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ReferenceModel(folder).forward(TOKENS).logits
    monkeypatch.setattr("tideforge.engine.reference_model.UPCAST", 3 * 64 * 64)
    torch.testing.assert_close(ReferenceModel(folder).forward(TOKENS).logits, expected, atol=3e-5, rtol=0)


def test_on_the_plain_pages_it_answers_as_without_pages(reference: Reference) -> None:
    logits, (keys, values) = reference.logits(TOKENS), reference.kv(TOKENS)
    for start in (0, 1, 17, len(TOKENS) - 1):
        found = reference.on_pages(TOKENS, start, keys[:, :start], values[:, :start])
        np.testing.assert_allclose(found, logits[start:], atol=3e-5, rtol=0)
    short = reference.on_pages(TOKENS, 30, keys[:2, :30], values[:2, :30], range(2))
    np.testing.assert_allclose(short, reference.logits(TOKENS, None, range(2))[30:], atol=3e-5, rtol=0)


def test_every_layers_pages_head_and_place_count(reference: Reference) -> None:
    start = 30
    keys, values = (part[:, :start] for part in reference.kv(TOKENS))
    plain = reference.on_pages(TOKENS, start, keys, values)
    for pages in (0, 1):
        for layer in range(keys.shape[0]):
            for place in (0, start - 1):
                for head in range(keys.shape[2]):
                    given = [keys.copy(), values.copy()]
                    given[pages][layer, place, head] *= -1
                    moved = np.abs(reference.on_pages(TOKENS, start, *given) - plain).max()
                    assert moved > 1e-4, (pages, layer, place, head)
    same_order = np.random.default_rng(0).permutation(start)
    moved = np.abs(reference.on_pages(TOKENS, start, keys[:, same_order], values[:, same_order]) - plain).max()
    assert moved < 3e-5, "places are turned into the keys: attention itself knows no order"


def test_other_orders_on_pages_are_the_noise_of_one_step(reference: Reference) -> None:
    start = 30
    keys, values = (part[:, :start] for part in reference.kv(TOKENS))
    plain = reference.on_pages(TOKENS, start, keys, values)
    fine, coarse = (reference.orders_on_pages(dtype, TOKENS, start, keys, values) for dtype in ("float32", "bfloat16"))
    assert fine.shape == coarse.shape == (ORDERS, len(TOKENS) - start, doubles.VOCAB)
    assert 0 < np.abs(fine - plain).max() < 1e-3 < np.abs(coarse - plain).max()
    with pytest.raises(ValueError, match="on_pages"):
        reference.on_pages(TOKENS, start, keys[:, 1:], values)
