"""Each family through the engine as it serves: paged cache, chunks of prompts, several sequences, step by step; and what
the check of an answer's tokens catches there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tideforge.engine import check, compare, doubles
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, ModelConfig, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.executor import Executor, Sampled
from tideforge.engine.forward import Forward
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.measure import Answer
from tideforge.engine.model_config import model_for
from tideforge.engine.reference import Reference
from tideforge.engine.scheduler import Request, Step
from tideforge.errors import CandidateError

CAPACITY = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 128}


class Kept:
    """Passes steps on and keeps the logits of each emitted token, by request."""

    def __init__(self, inner: LocalExecutor) -> None:
        self.inner, self.logits = inner, {}  # type: ignore[var-annotated]

    def execute(self, step: Step) -> Iterator[Sampled]:
        for sampled in self.inner.execute(step):
            for row, request in enumerate(step.request_ids):
                self.logits.setdefault(request, []).append(self.inner.memory.logits[row].clone())
            yield sampled

    def halt(self) -> None:
        self.inner.halt()


def answers(
    forward: Forward, settings: Settings, prompts: list[tuple[int, ...]], count: int
) -> tuple[list[Answer], Kept]:
    """Greedy answers of `count` tokens; prompts of more than 12 tokens are computed in chunks beside the decodes of others."""
    kept = Kept(LocalExecutor(forward, LocalMemory(settings)))
    core = EngineCore(Limits(**CAPACITY), BlockPool(settings.num_blocks, settings.block_size))
    executor: Executor = kept
    core.attach(forward.id, executor)
    chains: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(chains, prompts, strict=True):
        core.add(Request(name, prompt, count, forward=forward.id))
    while core.has_work():
        for event in core.step():
            chains[event.request_id].append(event.token)
    return [Answer(prompt, tuple(chain), ()) for prompt, chain in zip(prompts, chains.values(), strict=True)], kept


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The reference runs beside: two threads of each on two cores wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts_of(vocab: int, lengths: tuple[int, ...] = (21, 5, 33, 9, 14)) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(8)
    return [tuple(rng.integers(3, vocab, length).tolist()) for length in lengths]


@pytest.fixture(scope="module", params=sorted(doubles.DOUBLES))
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp(request.param)
    model = doubles.DOUBLES[request.param](folder / "model", seed=2)
    return Settings(folder / "s", model, limits=Limits(**CAPACITY), block_size=4, num_blocks=64)


@pytest.fixture(scope="module")
def reference(settings: Settings) -> Iterator[Reference]:
    reference = Reference.start(settings.model)
    yield reference
    reference.close()


def raw(settings: Settings) -> Forward:
    return Forward.load(model_for(ModelConfig.load(settings.model).architecture))


def test_every_decoded_token_has_the_logits_of_transformers(settings: Settings) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found, kept = answers(raw(settings), settings, prompts_of(doubles.VOCAB), 12)
    for name, answer in enumerate(found):
        chain = answer.prompt + answer.tokens
        with torch.inference_mode():
            expected = oracle(torch.tensor([chain])).logits[0, len(answer.prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(kept.logits[str(name)]), expected, atol=1e-4, rtol=0)
        assert answer.tokens == tuple(expected.argmax(-1).tolist())


def test_noise_is_finite_and_the_raw_forward_is_within_its_bound(settings: Settings, reference: Reference) -> None:
    text = prompts_of(doubles.VOCAB, (64,))[0]
    for dtype in ("float32", "bfloat16"):
        noise = reference.noise(dtype, text)
        assert 0 < noise.logit_max < np.inf and np.isfinite(noise.kl_max)
        assert np.isfinite([*noise.key_max, *noise.value_max]).all()
    bound = reference.bound("float32", text)
    assert bound < 0.1
    found, _ = answers(raw(settings), settings, prompts_of(doubles.VOCAB), 12)
    check.require_right(reference, found, all_layers(settings), bound)


def all_layers(settings: Settings) -> range:
    return range(ModelConfig.load(settings.model).num_hidden_layers)


MISTAKES = {
    # Positions count by their differences alone: keys one further on than queries are a mistake, both together are none.
    "a key turned one position too far": (" rotate(k, cos, sin)", " rotate(k, *after(cos, sin))"),
    "a rotated part turned one position too far": (" rotate(key[:, None], cos, sin)", " rotate(key[:, None], *after(cos, sin))"),
    "the expert beside the chosen one": ("*self.experts[expert])", "*self.experts[(expert + 1) % len(self.experts)])"),
    "one expert too few": ("topk(self.config.num_experts_per_tok,", "topk(self.config.num_experts_per_tok - 1,"),
    "one expert of the groups too few": ("topk(config.num_experts_per_tok,", "topk(config.num_experts_per_tok - 1,"),
    "one group too many": ("topk(config.topk_group,", "topk(config.topk_group + 1,"),
    "the bias counted as a share": ("shares = scores.gather(1, chosen)", "shares = (scores + self.bias).gather(1, chosen)"),
    "shares rescaled or not": ("if self.config.norm_topk_prob:", "if not self.config.norm_topk_prob:"),
}  # fmt: skip
AFTER = "\n\ndef after(*tables):\n    return (torch.cat((t[1:], t[-1:])) for t in tables)\n"


def test_mistakes_of_one_in_rotation_and_routing_are_caught(settings: Settings, reference: Reference) -> None:
    plain, bound = raw(settings), reference.bound("float32", prompts_of(doubles.VOCAB, (64,))[0])
    source, tried = plain.files["forward.py"], 0
    for name, (right, wrong) in MISTAKES.items():
        if right in source:
            tried += 1
            found, _ = answers(
                plain.with_file("forward.py", source.replace(right, wrong) + AFTER), settings, prompts_of(320), 12
            )
            with pytest.raises(CandidateError) as caught:
                check.require_right(reference, found, all_layers(settings), bound)
                pytest.fail(f"{name} passed")
            assert caught.value.outcome == "wrong"
    assert tried >= (1 if ModelConfig.load(settings.model).num_local_experts == 0 else 3)


def test_bounds_of_the_pages_cover_keys_and_values_of_every_layer(settings: Settings, reference: Reference) -> None:
    tokens = prompts_of(doubles.VOCAB, (30,))[0]
    memory = LocalMemory(settings)
    executor = LocalExecutor(raw(settings), memory)
    core = EngineCore(Limits(**CAPACITY), BlockPool(settings.num_blocks, settings.block_size))
    core.attach("f", executor)
    core.add(Request("a", tokens, 1, forward="f"))
    while core.has_work():
        core.step()
    bounds = compare.bounds(reference.noise("float32", tokens))
    for planes, expected, limits in zip(
        (memory.group.keys, memory.group.values), reference.kv(tokens), (bounds.key, bounds.value), strict=True
    ):
        for plane, wanted, limit in zip(planes, expected, limits, strict=True):
            written = plane.flatten(0, 1)[settings.block_size :][
                : len(tokens)
            ]  # the first blocks after the dummy, in order
            assert written.shape == wanted.shape
            assert np.abs(written.numpy() - wanted).max() <= limit
