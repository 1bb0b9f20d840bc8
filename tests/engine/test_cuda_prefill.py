"""One prompt of 96K tokens on one layer of Llama-3.2-1B's shape. Skipped, with the reason printed, where there is no GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tideforge.engine import prefill
from tideforge.engine.config import Limits, ModelConfig, Settings
from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab
from tideforge.engine.prefill import prefill_times, ttft_ratio
from tideforge.engine.random_weights import write
from tideforge.engine.reference import Reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"
LONGEST = 98_304


def last_logits(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """[V] in fp32, of a model of one layer: of the last token only, so that 96K tokens fit."""
    from safetensors.torch import load_file

    config = ModelConfig.load(folder)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors", "cuda").items()}

    def layer(name: str) -> torch.Tensor:
        return weights[f"model.layers.0.{name}.weight"]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(
            positions.float(), torch.tensor(config.rope_frequencies, dtype=torch.float32, device="cuda")
        )
        angles = torch.cat((angles, angles), -1)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    x = F.embedding(torch.tensor(tokens, device="cuda"), weights["model.embed_tokens.weight"])
    inside, places = norm(x, layer("input_layernorm")), torch.arange(len(tokens), device="cuda")
    keys = rotate((inside @ layer("self_attn.k_proj").T).unflatten(-1, (-1, config.head_dim)), places)
    values = (inside @ layer("self_attn.v_proj").T).unflatten(-1, (-1, config.head_dim))
    query = rotate((inside[-1:] @ layer("self_attn.q_proj").T).unflatten(-1, (-1, config.head_dim)), places[-1:])[0]
    query = query.unflatten(0, (config.num_key_value_heads, -1))
    shares = (torch.einsum("kgd,tkd->kgt", query, keys) * config.head_dim**-0.5).softmax(-1)
    attended = torch.einsum("kgt,tkd->kgd", shares, values).flatten()
    x = x[-1] + attended @ layer("self_attn.o_proj").T
    inside = norm(x, layer("post_attention_layernorm"))
    wide = F.silu(inside @ layer("mlp.gate_proj").T) * (inside @ layer("mlp.up_proj").T)
    x = x + wide @ layer("mlp.down_proj").T
    return norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


@pytest.mark.timeout(500)
@pytest.mark.parametrize("graphs", [False, True])
def test_96k_tokens_on_one_layer(tmp_path, end_keeper, monkeypatch, graphs):
    model, state = write(tmp_path / "model", "llama-3.2-1b", device="cuda", layers=1), tmp_path / "s"
    end_keeper(state)
    settings = Settings(
        state=state, model=model, dtype="bfloat16", device="cuda", limits=Limits(64, 8192, 4096, 100), num_blocks=64,
        capture_rows=(1, 64) if graphs else (), capture_tokens=(512, 2048) if graphs else (),
        capture_contexts=(4096,) if graphs else (),
    )  # fmt: skip
    answers, gap_of = [], prefill._Bench._gap
    monkeypatch.setattr(prefill._Bench, "_gap", lambda self, answer: answers.append(answer) or gap_of(self, answer))
    corpus = np.random.default_rng(1).integers(0, 128_256, 200_000).tolist()
    plain = Forward.load(LLAMA)
    other = plain.with_file("forward.py", plain.files["forward.py"] + "\n# the same\n")
    reference = Reference.start(model, state, device="cuda")
    with contextlib.closing(reference), contextlib.closing(Lab(settings)) as lab:
        found = prefill_times(lab, [plain, other], [512, 2048, 16_384, LONGEST], 1, corpus, reference)
        bound = reference.bound("bfloat16", corpus, range(1))
    for record in found:
        print(
            f"{record.context:6} tokens: {1e3 * record.ttft_s:8.2f} ms, {record.tokens_per_s:9.0f} tokens/s, gap {record.gap}"
        )
    print(f"equal sources at {LONGEST} tokens: {ttft_ratio(*found[-2:])}")
    assert [record.gap is None for record in found] == [False] * 4 + [True] * 4
    for answer in answers:
        logits = last_logits(model, answer.prompt)
        assert float(logits.max() - logits[answer.tokens[0]]) <= bound, len(answer.prompt)
    assert len(answers[-1].prompt) == LONGEST
    wrong = last_logits(model, answers[-1].prompt[: LONGEST // 2] + answers[-1].prompt[-1:])
    assert float((wrong - last_logits(model, answers[-1].prompt)).abs().max()) > bound, "the first half has a say"
