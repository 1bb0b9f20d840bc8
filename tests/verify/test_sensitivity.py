"""Faults are what they say, and the search finds the smallest one that a gate catches."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tideforge.engine.forward import Forward
from tideforge.engine.gates import GATES
from tideforge.engine.limits import FILE, limits
from tideforge.engine.model_config import model_for
from tideforge.tasks.verify.faults import FAULTS, Fault
from tideforge.tasks.verify.sensitivity import Bench, Notes, Search, main, table

Benches = Callable[[str, str], tuple[Bench, Forward]]
RECORD = Path(__file__).parents[2] / "docs" / "records" / "sensitivity.json"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"])
def test_every_raw_forward_has_every_fault_that_it_can_have(architecture: str) -> None:
    raw = Forward.load(model_for(architecture))
    for name, fault in FAULTS.items():
        forward = fault.of(raw, fault.sizes[0])
        if name == "expert scaled" and architecture == "LlamaForCausalLM":
            assert forward is None
        else:
            assert forward is not None and forward.id != raw.id
            compile(forward.files["forward.py"], name, "exec")


class Doubled:
    """A bench whose gates catch sizes from a known one on."""

    def __init__(self, least: dict[str, float]) -> None:
        self.least, self.runs = least, 0

    def run(self, forward: Any, gates: list[str]) -> dict[str, str]:
        self.runs += 1
        return {gate: "caught" if forward >= self.least[gate] else "" for gate in gates}


def test_the_search_finds_the_smallest_size() -> None:
    sizes = tuple(2.0**-power for power in range(16))
    fault = Fault("made", "1 - e", sizes, lambda source, size: source)
    object.__setattr__(fault, "of", lambda raw, size: size)
    bench = Doubled({"fine": 2.0**-11, "coarse": 0.3, "only the largest": 1.0, "blind": 2.0, "all": 0.0})
    search = Search(bench, None, fault, draws=2)  # type: ignore[arg-type]
    found = search.smallest([*bench.least])
    assert found == {"fine": 2.0**-11, "coarse": 0.5, "only the largest": 1.0, "blind": None, "all": sizes[-1]}
    assert bench.runs <= 2 * len(sizes)


def test_a_measured_search_and_its_table(benches: Benches) -> None:
    bench, raw = benches("llama", "float32")
    sizes = FAULTS["layer scaled"].sizes
    found = Search(bench, raw, FAULTS["layer scaled"], draws=1).smallest(["quality", "determinism"])
    assert found["determinism"] is None, "it compares a forward with itself"
    assert found["quality"] is not None and sizes[-1] < found["quality"] < 2**-8
    result = {
        "faults": {"layer scaled": found}, "rejected": [], "seconds": {"quality": 0.1, "determinism": 0.1},
        "blind": {"quality": "blind to all"},
    }  # fmt: skip
    told = table({"tiny": result})
    assert (
        "2^-" in told and "raw forward rejected: never" in told and "on the raw forward quality is blind to all" in told
    )


@pytest.mark.parametrize(
    ("fault", "size", "gate", "evidence"),
    [
        ("logits unsteady", 2.0**-18, "determinism", "two runs differ"),
        ("by block", 0.5, "permuted_tables", "on other blocks"),
    ],
)
def test_gates_that_compare_a_forward_with_itself_have_a_fault_of_their_own(
    fault: str, size: float, gate: str, evidence: str, benches: Benches
) -> None:
    bench, raw = benches("llama", "float32")
    forward = FAULTS[fault].of(raw, size)
    assert forward is not None
    assert bench.run(raw, [gate]) == {gate: ""} and evidence in bench.run(forward, [gate])[gate]


def test_a_gate_that_could_not_tell_is_noted(benches: Benches) -> None:
    bench, raw = benches("moe", "bfloat16")
    notes = Notes({}, {})
    assert bench.run(raw, ["long_context", "determinism"], notes) == {"long_context": "", "determinism": ""}
    assert notes.blind.keys() == {"long_context"} and notes.blind["long_context"].startswith(
        "blind to how much of what"
    )
    assert notes.seconds.keys() == {"long_context", "determinism"}


@pytest.mark.parametrize(("model", "dtype"), itertools.product(("llama", "moe"), ("float32", "bfloat16")))
def test_the_record_holds_every_gate_and_every_fault_of_today(model: str, dtype: str) -> None:
    record = json.loads(RECORD.read_text())
    found = record["models"][f"{model} {dtype}"]
    raw = Forward.load(model_for("LlamaForCausalLM" if model == "llama" else "MixtralForCausalLM"))
    assert found["faults"].keys() == {name for name, fault in FAULTS.items() if fault.of(raw, fault.sizes[0])}
    for name, sizes in found["faults"].items():
        assert sizes.keys() == GATES.keys() and {*sizes.values()} <= {None, *FAULTS[name].sizes}
    assert found["seconds"].keys() == GATES.keys() and found["dtype"] == dtype
    assert re.fullmatch("[0-9a-f]{40}", record["commit"]), "a tree as it was committed"
    assert record["draws"] > 1 and record["environment"].keys() >= {"machine", "kernel", "python", "torch"}


def test_a_record_is_shown_as_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sensitivity", "--show", str(RECORD)])
    main()
    lines = capsys.readouterr().out.splitlines()
    for name in json.loads(RECORD.read_text())["models"]:
        assert any(line.startswith(f"{name}: smallest fault caught (") for line in lines)
    assert {*GATES} <= {line.split()[0] for line in lines if line}


def test_limits_are_the_records() -> None:
    record = json.loads(FILE.read_text())
    for key, figures in record["limits"].items():
        dtype, kind = key.split("/")
        assert vars(limits(dtype, kind)) == figures
        for figure, limit in figures.items():
            assert limit >= max(record["largest"][key][figure].values()), "no honest forward was further off"
    assert limits("float16", "dense") == limits("bfloat16", "dense")
