"""Each gate catches what it is there for, and an honest rewrite passes them all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.forward import Forward
from tideforge.engine.lab import keeper_status
from tideforge.engine.reference import Reference
from tideforge.tasks.verify.gates import GATES
from tideforge.tasks.verify.node import Trialled, run_gate

PLAIN = Forward.load(Path(__file__).parents[2] / "engine" / "models" / "llama")
SOURCE = PLAIN.files["forward.py"]


def changed(old: str, new: str) -> Forward:
    assert SOURCE.count(old) >= 1, old
    return PLAIN.with_file("forward.py", SOURCE.replace(old, new))


# name -> (forward, gates that must catch it)
CHEATS = {
    "a layer scaled by 1.001": (changed("return x + self.mlp(", "return x + 1.001 * self.mlp("), {"written_kv", "quality"}),
    "the last layer skipped": (changed("for layer in self.layers:", "for layer in self.layers[:-1]:"), {"written_kv", "quality"}),
    "keys beyond 96 tokens forgotten": (
        changed("mask = context <= batch.positions[rows, None]", (
            "mask = (context <= batch.positions[rows, None]) & (context > batch.positions[rows, None] - 96)")),
        {"long_context"},
    ),
    "values of a neighbouring page overwritten": (
        changed("self.values.flatten(0, 1).index_copy_(0, slots, v)", (
            "self.values.flatten(0, 1).index_copy_(0, slots, v); "
            "self.values.flatten(0, 1).index_copy_(0, (slots + 160) % self.values.flatten(0, 1).shape[0], v)")),
        {"canary_pages"},
    ),
    "its own seven-bit keys": (
        changed("self.keys.flatten(0, 1).index_copy_(0, slots, k)",
                "self.keys.flatten(0, 1).index_copy_(0, slots, k.bfloat16().float())"),
        {"written_kv"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, Workload]]:
    folder = tmp_path_factory.mktemp("gates")
    shapes = tuple(RequestShape(8, 4) for _ in range(4))
    workload = Workload(4, shapes, shapes, tuple((7 * i + i // 11) % 250 for i in range(4000)), "p", 0)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)
    settings = Settings(folder / "s", tiny_llama(folder / "model"), num_blocks=64, limits=limits)
    yield settings, workload
    if (status := keeper_status(settings.state)) is not None:
        os.kill(status["pid"], signal.SIGTERM)


def failed(bench: tuple[Settings, Workload], candidate: Forward) -> set[str]:
    settings, workload = bench
    with contextlib.closing(Reference.start(settings.model)) as reference:
        bounds = reference.bounds(settings.dtype, workload.corpus)
    with contextlib.closing(Trialled(settings, settings.state, PLAIN, candidate, workload, bounds)) as trialled:
        results = [run_gate(name, trialled.probe()) for name in GATES]
    assert all(result.evidence for result in results if not result.passed)
    return {result.name for result in results if not result.passed}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught_by_its_gate(name: str, bench: tuple[Settings, Workload]) -> None:
    candidate, gates = CHEATS[name]
    assert gates <= failed(bench, candidate)


def test_the_plain_forward_and_another_reduction_order_pass(bench: tuple[Settings, Workload]) -> None:
    reordered = changed(
        "return F.linear(F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj), self.down_proj)",
        "y = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj); n = y.shape[-1] // 2; "
        "return F.linear(y[..., n:], self.down_proj[:, n:]) + F.linear(y[..., :n], self.down_proj[:, :n])",
    )
    assert failed(bench, PLAIN) == set() and failed(bench, reordered) == set()


def test_a_worker_that_talks_nonsense_is_an_outcome(bench: tuple[Settings, Workload]) -> None:
    from tideforge.engine.lab import Lab
    from tideforge.errors import CandidateError

    settings, _ = bench
    shout = "\n\ndef build(ctx):\n    torch.os.write(int(torch.sys.argv[-1]), b'\\xff' * 64)\n    return lambda batch: None\n"
    with contextlib.closing(Lab(dataclasses.replace(settings))) as lab, pytest.raises(CandidateError) as caught:
        lab.spawn(PLAIN.with_file("forward.py", SOURCE + shout), lab.arena("nonsense"))
    assert caught.value.outcome == "forward_error" and "malformed" in caught.value.message
