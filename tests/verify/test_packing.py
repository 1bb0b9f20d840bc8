"""Memory that a forward keeps beside its weights is declared, counted from outside, and no more than declared."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideforge.engine import nvml
from tideforge.engine.conduct import GROWN_DEVICE_BYTES
from tideforge.engine.doubles import DOUBLES, tiny_deepseek
from tideforge.engine.forward import ENTRY, PACKING, Forward
from tideforge.engine.held import Held, file_of, held, of_worker
from tideforge.engine.lab import end_keeper
from tideforge.engine.model_config import model_for
from tideforge.engine.random_shapes import weights_bytes
from tideforge.engine.weights import read_tensors
from tideforge.errors import CandidateError, UserError
from tideforge.tasks.by_hand import read_forward
from tideforge.tasks.verify import packing as gate
from tideforge.tasks.verify.alone import find_forward
from tideforge.tasks.verify.examine import run_gate, run_own
from tideforge.tasks.verify.flags import flags_of
from tideforge.tasks.verify.packing import Slack
from tideforge.tasks.verify.slack import Reading, slack_of
from tideforge.tasks.verify.verdict import GateResult, Verdict

from .conftest import Place

MIB = 1 << 20
KEPT = 128 * MIB
PLAIN = Forward.load(model_for("LlamaForCausalLM"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("deepseek")
    place = Place.of(folder, tiny_deepseek(folder / "model"), "DeepseekV3ForCausalLM")
    yield place
    end_keeper(place.settings.state)


KEEPING = """

def build(ctx, inner=build):
    import mmap, os, torch
    forward, kept = inner(ctx), []

    def keeps(batch):
        if not kept:
            kept.append({how})
        forward(batch)

    return keeps
"""


def keeping(plain: Forward, how: str) -> Forward:
    """The raw forward, which from its first step on keeps KEPT bytes that `how` makes."""
    return plain.with_file(ENTRY, plain.files[ENTRY] + KEEPING.format(how=how))


OWN = f"torch.ones({KEPT}, dtype=torch.uint8)"
SHARED = f"torch.frombuffer(mmap.mmap(-1, {KEPT}), dtype=torch.uint8).fill_(1)"
FILES = f"[os.write(os.memfd_create('tideforge-weights'), bytes({8 * MIB})) for _ in range({KEPT // (8 * MIB)})]"


# --- the gate


@pytest.mark.parametrize("place", ["llama", "moe", "deepseek"])
def test_a_raw_forward_holds_what_a_raw_forward_holds(place: str, request: pytest.FixtureRequest) -> None:
    found: Place = request.getfixturevalue(place)
    with found.trialled(found.plain) as trialled:
        trialled.warm()
        result = run_own("packing", trialled)
        then = run_gate("determinism", trialled.probe())
    assert result.passed and not result.unverified, result.evidence or result.unverified
    assert result.figures["declared_bytes"] == result.figures["pages"] == 0 and "flag" not in result.figures
    assert abs(result.figures["measured_bytes"]) <= result.figures["slack_bytes"]
    assert result.figures["lived_bytes"] <= result.figures["lived_slack_bytes"]
    assert then.passed, "the worker is as it was"


@pytest.mark.parametrize(
    ("how", "declared"), [(OWN, 1_000_000), (SHARED, 0), pytest.param(FILES, 0, marks=pytest.mark.slow)]
)
def test_what_is_kept_and_not_declared_is_caught(llama: Place, how: str, declared: int) -> None:
    with llama.trialled(keeping(llama.plain, how).with_packing(declared)) as trialled:
        before = run_gate("determinism", trialled.probe())
        result = run_own("packing", trialled)
    assert before.passed, before.evidence
    assert not result.passed and result.evidence.startswith("a fresh worker holds")
    assert f"declared are {declared / MIB:.1f} MiB" in result.evidence
    assert float(result.evidence.split()[4]) == pytest.approx(KEPT / MIB, abs=Slack.of("cpu").fresh / MIB)


def test_what_is_kept_and_declared_passes_and_is_counted_in_pages(llama: Place) -> None:
    with llama.trialled(keeping(llama.plain, OWN).with_packing(KEPT)) as trialled:
        result = run_own("packing", trialled)
        layout, weights = trialled.lab.layout, trialled.lab.weights_bytes
    assert result.passed, result.evidence
    page = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, numbers, bytes
    assert page == layout.pages_bytes / layout.num_blocks and result.figures["pages"] == KEPT // page
    flag = f"128.0 MiB kept beside the weights, {KEPT / weights:.0%} of their bytes: {KEPT // page} pages less for the KV cache"
    verdict = Verdict("f", "i", (result,), (), 1.5, 1.4, 1.6, 1.0, 1.0, 1.0, 0.1, "w", {})
    assert f"packing: {flag}" in flags_of(verdict, PLAIN) and verdict.clean


def test_what_it_came_to_hold_later_and_threw_away_again_was_seen(llama: Place) -> None:
    with llama.trialled(llama.plain) as trialled:
        trialled.warm()
        trialled.look()
        [seen] = trialled.looks
        assert seen is not None
        trialled.looks.append(dataclasses.replace(seen, own=seen.own + KEPT + Slack.of("cpu").lived))
        result = run_own("packing", trialled)
    assert (
        not result.passed and result.evidence.startswith("the worker holds") and "declared are 0.0" in result.evidence
    )


@pytest.mark.slow
def test_an_incumbent_that_packs_undeclared_lets_no_candidate_do_so(llama: Place) -> None:
    packs = dataclasses.replace(llama, plain=keeping(llama.plain, OWN))
    with packs.trialled(packs.plain) as trialled:
        trialled.warm()
        assert "more than the raw forward's" in run_own("packing", trialled).evidence


def test_what_does_not_fit_is_refused_and_what_cannot_be_looked_at_is_told_apart(
    llama: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llama.trialled(llama.plain) as trialled:
        with monkeypatch.context() as none:
            none.setattr(gate, "room_bytes", lambda device: 0)
            full = run_own("packing", trialled)
        monkeypatch.setattr(gate, "of_worker", lambda ward, device: None)
        nowhere = run_own("packing", trialled)
        monkeypatch.undo()
        trialled.looks.append(None)
        hides = run_own("packing", trialled)
    assert not full.passed and full.evidence.endswith("the device has 0.0 MiB")
    assert not hides.passed and "does not let itself be looked at" in hides.evidence
    assert nowhere.passed and "kernel does not show" in nowhere.unverified


def test_the_slack_is_what_the_record_gives() -> None:
    kept = json.loads(gate.FILE.read_text())
    readings = [Reading(**one) for one in kept["records"]["cpu"]["readings"]]
    slack = Slack.of("cpu")
    assert slack == slack_of(readings) and slack.fresh > max(one.fresh for one in readings)
    assert slack.lived > max(one.lived for one in readings) and len(readings) >= 12
    assert {one.forward for one in readings} == {"raw", "offline"}
    assert {one.dtype for one in readings} >= {"float32", "bfloat16"}
    assert "gpu" in kept["slack_bytes"] or Slack.of("cuda:0") == Slack(GROWN_DEVICE_BYTES, GROWN_DEVICE_BYTES)


# --- what a process holds


def test_own_shared_and_open_memory_is_seen_from_outside() -> None:
    before = held([os.getpid()])
    own, shared = mmap.mmap(-1, KEPT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), mmap.mmap(-1, KEPT)
    file = os.memfd_create("notes")
    try:
        for kept in (own, shared):
            kept[:] = bytes(KEPT)
        os.write(file, bytes(KEPT))
        after = held([os.getpid()])
        assert before is not None and after is not None
        assert after.own - before.own == pytest.approx(KEPT, abs=16 * MIB)
        new = {name: size for name, size in after.files.items() if name not in before.files and size >= KEPT}
        assert sorted(new.values()) == [KEPT, KEPT] and file_of(file) in new
        assert after.beyond(before, {file_of(file): KEPT}) == pytest.approx(2 * KEPT, abs=16 * MIB)
    finally:
        own.close()
        shared.close()
        os.close(file)


def test_a_file_in_shared_memory_is_seen_though_nobody_has_it_open() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
        name = file_of(file.fileno())
        file.write(bytes(MIB))
    try:
        seen = held([os.getpid()])
        assert seen is not None and seen.files[name] == MIB
    finally:
        os.remove(file.name)


def test_files_of_both_and_what_was_given_do_not_count() -> None:
    ours = Held(100, {(1, 1): 50, (1, 2): 40, (1, 3): 30})
    assert ours.beyond(Held(90, {(1, 1): 7}), {(1, 2): 35}) == 10 + 5 + 30
    assert ours.beyond(ours, {}) == 0 and held([2**22 + 1]) is None


# --- a GPU's


class Driver:
    """libnvidia-ml of two GPUs. `shown`: bytes by process; `used`: of each GPU in all."""

    def __init__(self, shown: dict[int, int], used: list[int]) -> None:
        self.shown, self.used = shown, used

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, size: Any, processes: Any) -> int:
        held = self.shown.items() if device.value == 1 else ()
        for one, (pid, used) in zip(processes, held, strict=False):
            one.pid, one.used = pid, used
        size._obj.value = len(held)
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 100 * device.value, self.used[device.value - 1]
        return 0


def test_a_gpus_memory_is_a_processs_own_or_what_its_end_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({7: 30}, [40, 5])
    monkeypatch.setattr(nvml, "_library", lambda: driver)
    ended: list[Any] = []

    def end(worker: Any) -> None:
        ended.append(worker)
        driver.used[0] -= 25

    shown, hidden = (SimpleNamespace(ward=SimpleNamespace(pid=pid)) for pid in (7, 8))
    assert of_worker(shown.ward, "cuda:0") == Held(30, {}) and of_worker(hidden.ward, "cuda:0") is None  # type: ignore[arg-type]
    trialled: Any = SimpleNamespace(lab=SimpleNamespace(release=end))
    assert gate._returned(trialled, hidden) == 25 and ended == [hidden]  # type: ignore[arg-type]
    assert nvml.totals() == nvml.Total(20, 100) and gate.room_bytes("cuda:0") == 100


def test_where_there_is_no_nvml_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.totals() is None
    for ask in (lambda: gate.room_bytes("cuda:0"), lambda: gate._returned(SimpleNamespace(), SimpleNamespace())):  # type: ignore[arg-type]
        with pytest.raises(gate.Unverifiable, match="NVML does not say"):
            ask()


# --- what is declared


def test_a_declaration_is_part_of_the_forward() -> None:
    assert PLAIN.packing == 0 and PLAIN.with_packing(0) is PLAIN
    packs = PLAIN.with_packing(7)
    assert packs.packing == 7 and packs.id != PLAIN.id and json.loads(packs.files[PACKING]) == {"bytes": 7}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "nothing else"),
        ("{}", "nothing else"),
        ('{"bytes": 1, "more": 2}', "nothing else"),
        ('{"byte": 1}', "nothing else"),
        ('{"bytes": -1}', "a whole number, 0 or more"),
        ('{"bytes": 1.0}', "a whole number, 0 or more"),
        ('{"bytes": true}', "a whole number, 0 or more"),
        ('{"bytes": "7"}', "a whole number, 0 or more"),
        ('{"bytes": null}', "a whole number, 0 or more"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_line(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CandidateError, match=problem) as caught:
        PLAIN.with_file(PACKING, text)
    assert caught.value.outcome == "refused"
    (tmp_path / ENTRY).write_text(PLAIN.files[ENTRY])
    (tmp_path / PACKING).write_text(text)
    for read in (lambda: read_forward(tmp_path, PLAIN), lambda: find_forward(SimpleNamespace(), str(tmp_path))):  # type: ignore[arg-type]
        with pytest.raises(UserError, match=problem) as told:
            read()
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("double", DOUBLES)
def test_the_bytes_of_all_weights_are_known_from_config_json(double: str, tmp_path: Path) -> None:
    model = DOUBLES[double](tmp_path / "model")
    assert weights_bytes(model, "float32") == 4 * sum(array.size for _, _, array in read_tensors(model))
    assert weights_bytes(model, "bfloat16") == weights_bytes(model, "float32") // 2


def test_a_gates_flag_is_one_of_the_verdicts() -> None:
    told = GateResult("packing", True, "", 1.0, {"flag": "much is kept"})
    verdict = Verdict("f", "i", (told,), (), 1.5, 1.4, 1.6, 1.0, 1.0, 1.0, 0.1, "w", {})
    assert flags_of(verdict, PLAIN) == ("packing: much is kept",)
