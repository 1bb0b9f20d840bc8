"""Faults are what they say, and the search finds the smallest one that a gate catches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tideforge.engine.forward import Forward
from tideforge.engine.limits import FILE, limits
from tideforge.engine.model_config import model_for
from tideforge.tasks.verify.faults import FAULTS, Fault
from tideforge.tasks.verify.sensitivity import Bench, Search, table

Benches = Callable[[str, str], tuple[Bench, Forward]]


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
    result = {"faults": {"layer scaled": found}, "rejected": [], "seconds": {"quality": 0.1, "determinism": 0.1}}
    assert "2^-" in table({"tiny": result}) and "raw forward rejected: never" in table({"tiny": result})


def test_limits_are_the_records() -> None:
    record = json.loads(FILE.read_text())
    for key, figures in record["limits"].items():
        dtype, kind = key.split("/")
        assert vars(limits(dtype, kind)) == figures
        for figure, limit in figures.items():
            assert limit >= max(record["largest"][key][figure].values()), "no honest forward was further off"
    assert limits("float16", "dense") == limits("bfloat16", "dense")
