"""Each gate catches what it is there for, and an honest rewrite passes them all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tideforge.data.workload import RequestShape, Turn, Workload
from tideforge.engine.compare import Bounds
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import tiny_deepseek, tiny_llama
from tideforge.engine.forward import Forward
from tideforge.engine.gates import GATES
from tideforge.engine.gates.kv import DRAWS
from tideforge.engine.gates.probe import Probe
from tideforge.engine.lab import end_keeper
from tideforge.engine.model_config import model_for
from tideforge.engine.objective import Objective
from tideforge.engine.outlive import INCUMBENT_RETRIES
from tideforge.engine.reference import Reference
from tideforge.tasks import evidence
from tideforge.tasks.endpoint import Budget
from tideforge.tasks.facts import why_failed
from tideforge.tasks.verify.examine import examine, run_gate
from tideforge.tasks.verify.plan import AFTER, OF_BLOCKS, Plan, choosable
from tideforge.tasks.verify.trialled import Trialled
from tideforge.tasks.verify.verdict import Verdict, reason

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
    end_keeper(settings.state)


@pytest.fixture
def latent(bench: tuple[Settings, Workload], tmp_path: Path) -> Iterator[tuple[Settings, Workload]]:
    settings = dataclasses.replace(bench[0], state=tmp_path / "s", model=tiny_deepseek(tmp_path / "model"))
    yield settings, bench[1]
    end_keeper(settings.state)


def failed(bench: tuple[Settings, Workload], candidate: Forward, incumbent: Forward = PLAIN) -> set[str]:
    settings, workload = bench
    with contextlib.closing(Reference.start(settings.model)) as reference:
        bounds = reference.bounds(settings.dtype, workload.corpus)
    with contextlib.closing(Trialled(settings, settings.state, incumbent, candidate, workload, bounds)) as trialled:
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


def test_pages_of_latent_attention_pass_and_a_rounded_latent_is_caught(latent: tuple[Settings, Workload]) -> None:
    plain = Forward.load(model_for("DeepseekV3ForCausalLM"))
    text = plain.files["forward.py"]
    rounded = text.replace("slots, latent[:, None])", "slots, latent[:, None].bfloat16().float())")
    assert rounded != text
    assert failed(latent, plain, plain) == set()
    assert "written_kv" in failed(latent, plain.with_file("forward.py", rounded), plain)


def test_a_worker_that_talks_nonsense_is_an_outcome(bench: tuple[Settings, Workload]) -> None:
    from tideforge.engine.lab import Lab
    from tideforge.errors import CandidateError

    settings, _ = bench
    shout = "\n\ndef build(ctx):\n    torch.os.write(int(torch.sys.argv[-1]), b'\\xff' * 64)\n    return lambda batch: None\n"
    with contextlib.closing(Lab(dataclasses.replace(settings))) as lab, pytest.raises(CandidateError) as caught:
        lab.spawn(PLAIN.with_file("forward.py", SOURCE + shout), lab.arena("nonsense"))
    assert caught.value.outcome == "forward_error" and "malformed" in caught.value.message


# --- what a verification says when it could not do everything

NEEDED = len(choosable()) - len(AFTER)  # gates that must have run when the time is over


@pytest.fixture(scope="module")
def bounds(bench: tuple[Settings, Workload]) -> Bounds:
    settings, workload = bench
    with contextlib.closing(Reference.start(settings.model)) as reference:
        return reference.bounds(settings.dtype, workload.corpus)


def examined(bench: tuple[Settings, Workload], bounds: Bounds, plan: Plan) -> Verdict:
    """By a clock that goes on a second with each thing done."""
    settings, workload = bench
    settings.state.mkdir(exist_ok=True)
    done: list[str] = []
    return examine(
        settings, settings.state, PLAIN, PLAIN, workload, bounds, plan, done.append, lambda: float(len(done))
    )


def test_pairs_beyond_those_that_must_be_are_left_out_when_time_is_over(
    bench: tuple[Settings, Workload], bounds: Bounds
) -> None:
    verdict = examined(bench, bounds, Plan(pairs=5, least=2, seconds=NEEDED + 3))
    assert len(verdict.pairs) == 3 and {gate.name for gate in verdict.gates} == {*choosable(), *OF_BLOCKS}
    said = f"out of time, but with pairs enough: 3 of 5 held-out pairs in {NEEDED + 3} s"
    assert verdict.cut == said and not verdict.unverified
    won = dataclasses.replace(verdict, ci_low=1.1)
    assert won.passed and reason(won).endswith(f"on 3 held-out pairs ({verdict.cut})")
    assert won.to_dict()["cut"] == verdict.cut


def test_held_out_pairs_are_of_the_objective(bench: tuple[Settings, Workload], bounds: Bounds) -> None:
    settings, workload = bench
    talks = tuple(dataclasses.replace(shape, turns=(Turn(5, 3, 0.0),)) for shape in workload.held_out)
    plan, workload = Plan(pairs=2, least=2, seconds=1e9), dataclasses.replace(workload, held_out=talks)
    settings.state.mkdir(exist_ok=True)
    seen = examine(settings, settings.state, PLAIN, PLAIN, workload, bounds, plan, objective=Objective("ttft"))
    assert not seen.unverified and all(gate.passed for gate in seen.gates) and seen.objective == "ttft"
    assert len(seen.scores) == len(seen.pairs) == 2 and seen.scores != seen.pairs
    found = evidence.held_out(seen.scores, ())
    assert (seen.ratio, seen.ci_low, seen.ci_high) == (found.ratio, found.low, found.high)


@pytest.mark.parametrize("seconds", [0.0, 4.0, NEEDED + 1.0])
def test_what_must_be_and_was_not_leaves_the_finalist_unverified(
    bench: tuple[Settings, Workload], bounds: Bounds, seconds: float
) -> None:
    verdict = examined(bench, bounds, Plan(pairs=5, least=2, seconds=seconds))
    won = dataclasses.replace(verdict, ci_low=1.1)
    assert not won.passed and all(gate.passed for gate in won.gates), "nobody failed"
    assert reason(won).startswith(
        f"not verified: out of time: {len(verdict.pairs)} of 5 held-out pairs in {seconds:g} s"
    )
    assert len(verdict.pairs) + len([gate for gate in verdict.gates if gate.name in choosable()]) == seconds
    assert why_failed(won.to_dict()) == reason(won)


def test_time_enough_leaves_nothing_out(bench: tuple[Settings, Workload], bounds: Bounds) -> None:
    verdict = examined(bench, bounds, Plan(pairs=2, least=2, seconds=NEEDED + 2))
    assert len(verdict.pairs) == 2 and not verdict.cut and not verdict.unverified
    budget = Budget(held_out_pairs=3, least_held_out_pairs=8, verify_s=5)
    assert Plan.of(budget) == Plan(3, 3, 5.0), "no more are asked for than are planned"


@pytest.mark.parametrize("deaths", [1, INCUMBENT_RETRIES + 1])
def test_an_incumbents_death_is_not_the_candidates(
    bench: tuple[Settings, Workload], bounds: Bounds, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, left = Trialled._pair, [deaths]

    def dies(self: Trialled, part: Any, turned: bool = False) -> Any:
        if self.blocks and left[0]:
            left[0] -= 1
            os.kill(self.a.pid, signal.SIGKILL)
        return pair(self, part, turned)

    monkeypatch.setattr(Trialled, "_pair", dies)
    verdict = examined(bench, bounds, Plan(pairs=3, least=3, seconds=100))
    assert left == [0] and all(gate.passed for gate in verdict.gates)
    if deaths == 1:
        assert len(verdict.pairs) == 3 and not verdict.unverified
    else:
        assert not verdict.passed and "the incumbent's worker died 4 times" in reason(verdict)


def test_a_gate_that_preempted_nothing_was_not_asked(
    bench: tuple[Settings, Workload], bounds: Bounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, workload = bench
    core, roomy = Probe.core, [True] * (DRAWS + 1)  # and one more, with which the second time begins

    def with_room(self: Probe, recorder: Any, num_blocks: int | None = None, prefix_cache: bool = False) -> Any:
        return core(self, recorder, None if roomy and roomy.pop() else num_blocks, prefix_cache)

    monkeypatch.setattr(Probe, "core", with_room)
    with contextlib.closing(Trialled(settings, settings.state, PLAIN, PLAIN, workload, bounds)) as trialled:
        first, second = (run_gate("block_reuse", trialled.probe()) for _ in range(2))
    assert first.unverified.startswith(f"nothing was preempted in {DRAWS} draws"), (
        "a person reads that it was not asked"
    )
    assert second.passed and second.figures["preemptions"] > 0 and not roomy, second.evidence
