"""The trained mixture of experts in data/models: it says something, loads everywhere alike, and wrong routing shows on it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tideforge.engine import check
from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.forward import Forward
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.measure import Answer
from tideforge.engine.reference import Reference
from tideforge.engine.scheduler import Request
from tideforge.errors import CandidateError

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "data" / "models" / "small-moe"
RAW = Forward.load(ROOT / "engine" / "models" / "moe")


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokens(tokenizer) -> list[int]:
    return list(tokenizer.encode((ROOT / "data" / "samples" / "corpus.txt").read_text()[20000:22000]).ids)


@pytest.fixture(scope="module")
def reference():
    one = Reference.start(MODEL)
    yield one
    one.close()


def answer(forward: Forward, prompt: list[int], state: Path) -> Answer:
    settings = Settings(state=state, model=MODEL, num_blocks=32, limits=Limits(2, 64, 256))
    core = EngineCore(settings.limits, BlockPool(32, settings.block_size))
    core.attach("f", LocalExecutor(forward, LocalMemory(settings)))
    core.add(Request("r", tuple(prompt), 24, forward="f"))
    events = []
    while core.has_work():
        events += core.step()
    return Answer(tuple(prompt), tuple(event.token for event in events), tuple(range(len(events))))


def test_the_record_is_of_these_weights() -> None:
    record = json.loads((ROOT / "docs" / "records" / "moe_training.json").read_text())
    found = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert record["model_safetensors_sha256"] == found


def test_it_predicts_a_book_that_it_never_saw(reference, tokenizer, tokens) -> None:
    span = tokens[:512]
    logits = torch.tensor(reference.logits(span))
    nats = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(span[1:]), reduction="sum")
    count = len(tokenizer.decode(span[1:]).encode())
    assert float(nats) / np.log(2) / count < 2.8  # bits per byte; 4.4 by the frequencies of its bytes


def test_it_loads_in_transformers_with_the_same_logits(reference, tokens) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens[:96]])).logits[0].numpy()
    assert np.abs(theirs - reference.logits(tokens[:96])).max() < 1e-3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shares = shares / shares.sum(-1, keepdim=True)", "pass"),
        ("shares.topk(self.config.num_experts_per_tok", "shares.topk(self.config.num_experts_per_tok - 1"),
    ],
)
def test_the_raw_forward_is_right_and_wrong_routing_is_caught(reference, tokens, tmp_path, old, new) -> None:
    layers, bound = range(4), reference.bound("float32", tokens)
    prompt = tokens[100:140]
    assert check.require_right(reference, [answer(RAW, prompt, tmp_path)], layers, bound).gap <= bound
    source = RAW.files["forward.py"]
    assert old in source
    wrong = RAW.with_file("forward.py", source.replace(old, new, 1))
    with pytest.raises(CandidateError, match="the reference prefers"):
        for start in range(0, 800, 100):
            check.require_right(reference, [answer(wrong, tokens[start : start + 40], tmp_path)], layers, bound)
