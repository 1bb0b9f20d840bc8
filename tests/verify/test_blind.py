"""A gate that passes though part of it could not have told says so, and whoever approves reads it; where all of it could not, it
counts as not asked."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Callable

import pytest

from tideforge.engine import matched
from tideforge.engine.forward import Forward
from tideforge.engine.gates import given
from tideforge.engine.limits import limits
from tideforge.tasks.verify.examine import run_gate
from tideforge.tasks.verify.flags import flags_of
from tideforge.tasks.verify.sensitivity import Bench
from tideforge.tasks.verify.verdict import GateResult, Verdict

precision = importlib.import_module("tideforge.engine.gates.precision")  # the package names a gate so
quality = importlib.import_module("tideforge.engine.gates.quality")
PARTLY_BLIND = ("long_context", "given_pages", "precision")
Benches = Callable[[str, str], tuple[Bench, Forward]]


def asked(gate: str, bench: Bench, raw: Forward) -> GateResult:
    """Of the raw forward, on draws that are the same each time."""
    with bench.probe(raw) as probe:
        rng = random.Random(5)
        return run_gate(gate, dataclasses.replace(probe, secret=lambda: rng.getrandbits(63)))


def flags(raw: Forward, *gates: GateResult) -> tuple[str, ...]:
    """But for those of the source, which are not the gates'."""
    found = flags_of(Verdict("f", "i", gates, (), 1.5, 1.4, 1.6, 1.0, 1.0, 1.0, 0.1, "w", {}), raw)
    return tuple(flag for flag in found if not flag.startswith("source: "))


@pytest.mark.parametrize("gate", PARTLY_BLIND)
def test_a_gate_with_power_says_nothing(gate: str, benches: Benches) -> None:
    bench, raw = benches("llama", "float32")
    found = asked(gate, bench, raw)
    assert found.passed and not found.unverified and found.figures["blind"] == "" and flags(raw, found) == ()


def test_no_needle_shows_in_a_mixture_at_16_bits(benches: Benches) -> None:
    bench, raw = benches("moe", "bfloat16")
    found = asked("long_context", bench, raw)
    assert found.passed and found.figures["needle_shows"] is False
    [flag] = flags(raw, found)
    assert flag.startswith("long_context is blind to how much of what lies ") and "moved the reference's logits" in flag


def test_pages_whose_older_half_moves_nothing_are_named(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, raw = benches("llama", "float32")
    halved = given._halved
    monkeypatch.setattr(given, "_halved", lambda bits: bits if bits[0].shape[1] > 16 else halved(bits))
    found = asked("given_pages", bench, raw)
    longest, middle, shortest = found.figures["contexts"]
    named = sorted({longest, middle} - {shortest})
    [flag] = flags(raw, found)
    assert found.passed and flag.startswith(
        f"given_pages is blind to the older half of pages of {', '.join(map(str, named))} tokens: "
    )


def test_cheaper_precisions_that_too_few_rows_cannot_tell_are_named(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, raw = benches("llama", "bfloat16")
    for name, few in (("SPANS", 1), ("ROWS", 12), ("ROUNDS", 1)):
        monkeypatch.setattr(precision, name, few)
    found = asked("precision", bench, raw)
    weak = [*found.figures["without_power"], *found.figures["long"]["without_power"]]
    [flag] = flags(raw, found)
    assert found.passed and weak and flag.startswith("precision is blind to ") and all(name in flag for name in weak)
    assert "would not show in 12 logits rows" in flag


def test_where_no_filter_has_power_precision_counts_as_not_asked(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matched, "HALF", 1e-12)
    found = asked("precision", *benches("llama", "float32"))
    assert found.passed and found.unverified.startswith("half of the error of no cheaper arithmetic would show")
    monkeypatch.setattr(precision, "NAMES", {"float32": ()})
    assert asked("precision", *benches("llama", "float32")).unverified


def test_endings_that_noise_could_swap_count_as_not_asked(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = dataclasses.replace(limits("float32", "dense"), kl_p99=1e20)
    monkeypatch.setattr(quality, "limits", lambda dtype, kind: wide)
    bench, raw = benches("llama", "float32")
    assert asked("task_score", bench, raw).unverified.startswith("noise moves an ending by ")
    head = "copy_(F.linear(x, self.head))"
    broken = raw.files["forward.py"].replace(head, "copy_(F.linear(x, self.head) * float('nan'))")
    assert not asked("task_score", bench, raw.with_file("forward.py", broken)).passed, "that is no lack of power"


def test_any_gates_sentence_is_a_flag_and_an_empty_one_is_not() -> None:
    gates = (
        GateResult("one", True, "", 1.0, {"blind": "all that is small: noise is larger"}),
        GateResult("two", True, "", 1.0, {"blind": "", "rows": 3}),
        GateResult("three", True, "", 1.0, {}),
    )
    raw = Forward({"forward.py": "x = 1\n"})
    assert flags(raw, *gates) == ("one is blind to all that is small: noise is larger",)
