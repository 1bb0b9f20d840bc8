"""What decides, what is left to a person, and how `tideforge verify` says both."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tideforge.engine.doubles import tiny_llama, tiny_moe
from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.lab import keeper_status
from tideforge.engine.measure import Answer, Block
from tideforge.engine.model_config import ModelConfig, model_for
from tideforge.engine.possible import floor_s
from tideforge.engine.screen import findings
from tideforge.flows.cli import main
from tideforge.tasks.verify.examine import of_blocks
from tideforge.tasks.verify.flags import flags_of
from tideforge.tasks.verify.plan import AFTER, Plan, choosable, required
from tideforge.tasks.verify.verdict import GateResult, Verdict, reason

PLAIN = Forward.load(model_for("LlamaForCausalLM"))
GATES = tuple(GateResult(name, True, "", 1.0, {}) for name in sorted(required()))
WON = Verdict("f", "i", GATES, ((1.0, 1.5),) * 8, 1.5, 1.4, 1.6, 1.0, 1.0, 1.0, 0.1, "w", {})


def test_a_verdict_passes_with_every_gate_and_a_gain_beyond_doubt() -> None:
    assert WON.passed and WON.clean
    for gate in GATES:
        less = dataclasses.replace(WON, gates=tuple(one for one in GATES if one is not gate))
        lost = dataclasses.replace(WON, gates=(*less.gates, GateResult(gate.name, False, "token 3", 1.0, {})))
        assert not less.passed and not lost.passed and reason(lost) == f"failed {gate.name}: token 3"
    assert not dataclasses.replace(WON, ci_low=1.0).passed and not dataclasses.replace(WON, unverified="x").passed


def test_a_gain_too_good_and_a_gate_not_asked_are_flags_and_decide_nothing() -> None:
    asked = dataclasses.replace(
        WON, ratio=2.1, ci_low=2.05, gates=(*GATES[:-1], dataclasses.replace(GATES[-1], unverified="no room"))
    )
    flags = flags_of(asked, PLAIN)
    assert flags[0] == f"{GATES[-1].name} not verified: no room" and flags[1].startswith("2.10 times the incumbent")
    assert asked.passed and flags_of(WON, PLAIN) == ()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import threading", "threads"),
        ("torch.os.environ", "operating system"),
        ("getattr(torch, 'os')", "operating system"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "global flags"),
        ("torch.sys._getframe(1)", "other objects"),
        ("open('/proc/self/maps')", "files"),
        ("from time import sleep", "time"),
        ("import ctypes.util", "foreign code"),
        ("x.to(torch.int8)", "cheaper precision"),
    ],
)
def test_findings_name_kind_file_and_line(text: str, kind: str) -> None:
    found = findings(PLAIN.with_file("more.py", f"import torch\n\n{text}\n"))
    assert [one for one in found if one.startswith(f"{kind}: ") and one.endswith("(more.py, line 3)")], found
    assert findings(PLAIN) == []


class Blocks:
    """A Trialled that has timed one pair."""

    def __init__(self, seconds: float) -> None:
        answers = (Answer((1,), (1, 2, 3, 4), (0.1, 0.2, 0.3, 0.4)), Answer((1,), (1,), (0.1,)))
        self.blocks = [(Block(9.0, answers), Block(seconds, answers))]
        self.bounds = type("Bounds", (), {"logit_gap": 0.1})


@pytest.mark.parametrize(("floor", "passed"), [(0.1, True), (0.11, False), (0.0, True)])
def test_steps_under_the_floor_are_an_error(floor: float, passed: bool) -> None:
    answers, possible = of_blocks(Blocks(0.4), 1.0, floor)  # type: ignore[arg-type]
    assert answers.passed and possible.passed is passed
    assert passed or possible.evidence == "a step of 100 ms is under the floor, 110 ms"


def test_the_floor_counts_what_a_token_must_read(tmp_path: Path) -> None:
    dense, sparse = (ModelConfig.load(made(tmp_path / made.__name__)) for made in (tiny_llama, tiny_moe))
    assert floor_s(dense, "float32", 1_000_000, None, 0) == 0
    assert floor_s(dense, "float32", 1_000_000, 1e6, 250_000) == 0.75
    table, idle = 320 * 64 * 4, 2 * (8 - 2) * 3 * 64 * 64 * 4  # six of eight experts in both layers are not read
    assert floor_s(sparse, "float32", 10_000_000, 1.0, 0) == 10_000_000 - table - idle


def test_gates_that_look_back_come_last_and_chosen_ones_alone() -> None:
    plan = Plan(3, 2, 1.0)
    assert sorted(plan.actions()) == sorted([*(set(choosable()) - set(AFTER)), "", "", ""])
    assert plan.looking_back() == list(AFTER) and plan.actions()[-1] == ""
    chosen = Plan(0, 0, 1.0, ("provenance", "quality"))
    assert chosen.actions() == ["quality"] and chosen.looking_back() == ["provenance"]
    assert chosen.shortfall(0, ["quality"])[1].startswith("out of time") and chosen.shortfall(0, chosen.names) == (
        "",
        "",
    )


# --- the command


@pytest.fixture
def endpoint(tmp_path: Path) -> dict[str, Any]:
    model = tiny_llama(tmp_path / "model")
    made = {
        "name": "tiny", "model": str(model), "launch": f"tideforge serve --model {model} --max-model-len 256 --num-blocks 64",
        "hardware": {"name": "cpu"}, "state": str(tmp_path / "state"),
        "workload": {"users": 2, "prompt_tokens": [8, 12], "output_tokens": 4, "search_output_tokens": 2},
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(made))
    return made


def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["verify", *words, "--endpoint", str(tmp_path / "tiny.yaml")])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_command_tells_by_its_exit_code_and_its_words(
    endpoint: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, tmp_path, str(model_for("LlamaForCausalLM")), "--gates", "written_kv,provenance")
    assert code == 0 and out.splitlines()[-1].startswith("passed (2 gates, ") and "sizes of the endpoint file" in err
    assert keeper_status(Path(endpoint["state"])) is None, "it was not there before"
    cheat = PLAIN.files[ENTRY].replace("index_copy_(0, slots, k)", "index_copy_(0, slots, 1.01 * k)")
    assert cheat != PLAIN.files[ENTRY]
    folder = PLAIN.with_file(ENTRY, cheat).save(tmp_path / "state" / "forwards")
    code, out, err = said(capsys, tmp_path, folder.name[:9], "--gates", "written_kv", "--json")
    told = json.loads(out)
    assert code == 1 and told["passed"] is False and told["forward"] == folder.name
    assert "layer 0 keys, token" in told["gates"][0]["evidence"] and "bound" in told["gates"][0]["evidence"]
    code, out, err = said(capsys, tmp_path, str(folder), "--gates", "written_kv")
    assert code == 1 and "layer 0 keys, token" in out and out.splitlines()[-1].startswith("failed: written_kv")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nothing-there"], "is no folder"),
        ([".", "--gates", "writen_kv"], "there is no gate 'writen_kv'"),
        ([".", "--gates", ""], "names no gate"),
        ([".", "--gates", " ,"], "names no gate"),
        ([str(Path(__file__).parent)], "is not a forward"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], problem: str, endpoint: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, tmp_path, *words)
    assert code == 2 and not out and problem in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_pairs_beside_another_forward_and_all_gates(
    endpoint: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = str(model_for("LlamaForCausalLM"))
    code, out, _ = said(capsys, tmp_path, plain, "--against", plain, "--pairs", "2", "--json")
    told = json.loads(out)
    assert code == 0, told["gates"]
    assert {gate["name"] for gate in told["gates"]} == required() and len(told["pairs"]) == 2
