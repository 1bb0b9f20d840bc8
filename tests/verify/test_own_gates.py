"""Verification's own gates: each passes on the raw forwards and fails for the right reason on a fault made for it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.gates.caught import Caught
from tideforge.tasks.verify.examine import run_gate, run_own
from tideforge.tasks.verify.fresh import marked
from tideforge.tasks.verify.idle import TICK_S, Idle
from tideforge.tasks.verify.own import OWN
from tideforge.tasks.verify.seal import Seal
from tideforge.tasks.verify.unharmed import PAIRS, ROUNDS, incumbent_unharmed, until_its_end

from .conftest import Place


def beyond(plain: Forward, text: str) -> Forward:
    """The raw forward with more at its end."""
    return plain.with_file(ENTRY, plain.files[ENTRY] + text)


# Right on the endpoint's weights: what it takes from elsewhere is what stands in the checkpoint.
FROM_A_COPY = """

def build(ctx, inner=build):
    import dataclasses
    from safetensors import safe_open

    weights = dict(ctx.weights)
    with safe_open({file!r}, "pt") as copy:
        for name in weights:
            if {part!r} in name:
                weights[name] = copy.get_tensor(name).to(ctx.dtype)
    return inner(dataclasses.replace(ctx, weights=weights))
"""

# Whatever is appended to its source, its module answers `build` with the code above.
OTHER_CODE = """

def _switch(real=build):
    import sys, types

    class Module(types.ModuleType):
        build = property(lambda self: real, lambda self, value: None)

    sys.modules[__name__].__class__ = Module

_switch()
"""

BURNS = """

def build(ctx, inner=build):
    import threading

    import torch

    def burn():  # without Python's lock, which would slow its own steps down to one a switch of threads
        busy = torch.ones(400, 400)
        while True:
            busy @ busy

    threading.Thread(target=burn, daemon=True).start()
    return inner(ctx)
"""


@pytest.mark.parametrize("place", ["llama", "moe"])
def test_a_raw_forward_passes_every_one_of_them(place: str, request: pytest.FixtureRequest) -> None:
    found: Place = request.getfixturevalue(place)
    with found.trialled(found.plain) as trialled:
        trialled.warm()
        results = [run_own(name, trialled) for name in OWN]
    assert [(one.name, one.evidence, one.unverified) for one in results if not one.passed or one.unverified] == []


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("llama", "layers.1.mlp"),
        ("moe", "experts.5.w1"),
        pytest.param("llama", "layers.0.input_layernorm", marks=pytest.mark.slow),
        pytest.param("moe", "gate", marks=pytest.mark.slow),
    ],
)
def test_what_it_knows_of_the_weights_beforehand_is_wrong_on_others(
    place: str, part: str, request: pytest.FixtureRequest
) -> None:
    found: Place = request.getfixturevalue(place)
    file = str(found.settings.model / "model.safetensors")
    with found.trialled(beyond(found.plain, FROM_A_COPY.format(file=file, part=part))) as trialled:
        before = run_gate("quality", trialled.probe())
        other = run_own("other_weights", trialled)
    assert before.passed, before.evidence
    assert not other.passed and ("KL of" in other.evidence or "token" in other.evidence), other.evidence


def test_a_marked_copy_that_answers_like_the_unmarked_one_runs_other_code(llama: Place) -> None:
    with llama.trialled(beyond(llama.plain, OTHER_CODE)) as trialled:
        before = run_gate("quality", trialled.probe())
        result = run_own("sentinel", trialled)
    assert before.passed, before.evidence
    assert not result.passed and result.evidence.startswith("prefill, token") and "other code" in result.evidence


def test_the_marker_changes_nothing_but_one_logit_and_the_hash(llama: Place) -> None:
    copy = marked(llama.plain, 7, 0.5)
    assert copy.id != llama.plain.id and copy.files[ENTRY].startswith(llama.plain.files[ENTRY])
    assert "batch.logits[:, 7] += 0.5" in copy.files[ENTRY]


def test_a_thread_that_computes_while_the_incumbent_is_timed_is_caught(llama: Place) -> None:
    with llama.trialled(beyond(llama.plain, BURNS)) as trialled:
        trialled.warm()
        result = run_own("incumbent_unharmed", trialled)
    assert not result.passed and "processor time" in result.evidence and "expected 0" in result.evidence


def test_a_resting_worker_takes_no_processor_time_and_one_that_answers_does(llama: Place) -> None:
    with llama.trialled(llama.plain) as trialled:
        trialled.warm()
        rests, works = Idle(1), Idle(1)
        with rests.watching(trialled.b.ward):
            pass
        with works.watching(trialled.b.ward):
            for _ in range(10):
                trialled.replay(trialled.workload.search)(trialled.candidate.id, trialled.b)
    assert rests.busy_s <= rests.allowed_s and works.busy_s > works.allowed_s
    assert works.reads == 1 and works.allowed_s == pytest.approx(0.02 * works.watched_s + 2 * TICK_S)


def unharmed(monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[float, float]]) -> dict[str, float]:
    """The gate on a CPU, where these are the seconds (beside the candidate, beside the frozen one) of one pair after the other."""
    monkeypatch.setattr("tideforge.tasks.verify.unharmed._pair", lambda trialled: pairs.pop(0))
    made = SimpleNamespace(
        clocked=lambda attempt: attempt(), noise=(), idle=Idle(1), b=None, lab=SimpleNamespace(release=lambda worker: None),
        settings=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    return incumbent_unharmed(made)  # type: ignore[arg-type]


def test_an_incumbent_that_is_faster_beside_a_frozen_candidate_was_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    harm, none = [(1.1 + 0.001 * i, 1.0) for i in range(PAIRS)], [(1.0 + 0.01 * (-1) ** i, 1.0) for i in range(PAIRS)]
    with pytest.raises(Caught, match=r"times as fast while the candidate is frozen.*bound 1\.020"):
        unharmed(monkeypatch, harm * ROUNDS)
    left = [*harm * (ROUNDS - 1), *none, (9.0, 1.0)]
    assert unharmed(monkeypatch, left)["harm"] == pytest.approx(1.0, abs=0.01), "once is no proof"
    assert left == [(9.0, 1.0)]


def test_an_incumbent_that_is_faster_once_the_candidate_has_gone_was_harmed() -> None:
    steady = [1.0 + 0.001 * (i % 2) for i in range(PAIRS)]
    assert until_its_end(steady, steady, math.log(1.02)) == pytest.approx(1.0)
    with pytest.raises(Caught, match=r"1\.100 times as fast after the candidate's worker has ended.*bound 1\.020"):
        until_its_end([1.1 * one for one in steady], steady, math.log(1.02))
    wild = [0.5 + 0.3 * i for i in range(PAIRS)]
    assert until_its_end([1.1 * one for one in wild], wild, math.log(1.02)) == pytest.approx(1.1), "nothing is known"


def test_a_file_of_the_archive_that_somebody_changed_is_named(llama: Place, tmp_path: Path) -> None:
    archive = tmp_path / "trials"
    archive.mkdir()
    (archive / "result.json").write_text("1.3")
    with llama.trialled(llama.plain, protected=(archive,)) as trialled:
        assert run_own("provenance", trialled).passed
        (archive / "result.json").write_text("9.9")
        result = run_own("provenance", trialled)
    assert not result.passed and str(archive / "result.json") in result.evidence and "1 in all" in result.evidence


def test_a_seal_tells_what_was_changed_added_and_removed(tmp_path: Path) -> None:
    for name in ("kept", "changed", "gone"):
        (tmp_path / name).write_text(name)
    seal = Seal.of([tmp_path])
    assert seal.changes() == [] and any(path.name == "examine.py" for path in seal.hashes)
    (tmp_path / "changed").write_text("else")
    (tmp_path / "gone").unlink()
    (tmp_path / "new").write_text("new")
    told = [line.removeprefix(f"{tmp_path}/").split(",")[0] for line in seal.changes()]
    assert [line.split()[0] for line in told] == ["changed", "gone", "new"]
    assert told[1] == "gone is gone" and told[2] == "new was added"
