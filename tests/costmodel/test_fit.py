"""What is fitted is what ranks, and a fit finds the coefficients that a file was made with."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tideforge.costmodel import fit, shapes
from tideforge.costmodel.coefficients import Coefficients, stored
from tideforge.costmodel.evaluate import COLUMNS, MEASURED, points, read_rows
from tideforge.costmodel.fit import PRIOR, Measured, coefficients, coordinates, stacked
from tideforge.costmodel.passes import Load, Setting, price, seconds, work
from tideforge.flows.cli import cli

MODELS = ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B", "openai/gpt-oss-120b", "MiniMaxAI/MiniMax-M2.5")
SLOW_LINKS = {"link_latency_s": 60e-6, "layer_s": 40e-6, "expert_skew": 0.9}


def write(path: Path, co: Coefficients) -> Path:
    """A file that agrees with `co` but for a group's own factor; layouts of 8 GPUs."""
    lines = []
    for model in MODELS:
        eps = (1,) if shapes.get(model).experts is None else (1, 2)
        for users in (8, 64, 512):
            for tp in (2, 4, 8):
                for ep in eps:
                    row = [model, "h200_sxm", "vllm", "fp8", 1024, 512, users, 8 // tp, tp, 1, ep if ep == 1 else tp]
                    lines.append([*row, f"{model} {users}", 1.0])
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([[*COLUMNS, MEASURED], *lines])
    found = [point.predicted for point in points(read_rows(path), co)]
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [[*COLUMNS, MEASURED], *([*line[:-1], value] for line, value in zip(lines, found, strict=True))]
        )
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    known = dataclasses.replace(Coefficients(), **{**PRIOR, **SLOW_LINKS})  # type: ignore[arg-type]
    return write(tmp_path_factory.mktemp("fit") / "measured.csv", known)


def test_arrays_of_passes_cost_what_each_costs(file: Path) -> None:
    rows, co = read_rows(file), Coefficients()
    one_by_one = [point.predicted for point in points(rows, co)]
    assert Measured(rows, co).predicted(co) == pytest.approx(one_by_one, rel=1e-12)
    settings = [Setting(row.layout, row.shape, row.machine, row.precision, co) for row in rows]
    loads = [Load.decode(8, 1000), Load.prefill(1000)]
    together = seconds(stacked([work(s, load) for s in settings for load in loads]), co)
    alone = [{term.name: term.seconds for term in price(s, load)} for s in settings for load in loads]
    for name, column in together.items():
        assert column == pytest.approx([terms.get(name, 0.0) for terms in alone], rel=1e-12)


def test_coordinates_go_there_and_back() -> None:
    again = coefficients(coordinates(PRIOR))
    assert {name: getattr(again, name) for name in PRIOR} == pytest.approx(PRIOR)
    far = coefficients(coordinates(PRIOR) + 50)
    assert max(getattr(far, name) for name in PRIOR if name.endswith("share")) <= 1


def test_a_fit_explains_the_order_inside_groups(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single coefficients stand in for each other in a small file; together they must put its layouts where they were."""
    monkeypatch.setattr(fit, "DRAWN", 0.003)
    data = Measured(read_rows(file), Coefficients())
    inside = data.errors(np.arange(len(data.rows)))
    found, rows = data.fitted(), len(data.rows)
    values = {name: getattr(found, name) for name in PRIOR}
    before, after = (np.abs(inside(coordinates(at))[:rows]).max() for at in (PRIOR, values))
    assert before > 0.1 and after < 0.2 * before
    assert found.link_latency_s + 4 * found.link_hop_s > 2 * (PRIOR["link_latency_s"] + 4 * PRIOR["link_hop_s"])


def test_folds_never_see_what_they_predict(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, seen = Measured(read_rows(file), Coefficients()), []

    def fitted(chosen: np.ndarray) -> Coefficients:
        seen.append({data.rows[at].model for at in chosen})
        return Coefficients()

    monkeypatch.setattr(data, "fitted", fitted)
    assert data.folded("model").min() > 0
    assert seen == [set(MODELS) - {model} for model in sorted(MODELS)]


def test_the_command_prints_tables_and_ends_with_json(file: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["evaluate-ranking", str(file), "--folds", "system"])
    assert "all rows are of one system" in str(shown.exception)
    shown = CliRunner().invoke(cli, ["evaluate-ranking", str(file)], catch_exceptions=False)
    last = json.loads(shown.output.splitlines()[-1])
    assert last["groups"] == 12 and last["folds"] is None and "an oracle, measurements with 5% of noise" in shown.output
    out = tmp_path / "coefficients.json"
    assert fit.main([str(file), "--out", str(out)]) == 0
    made = json.loads(out.read_text())
    assert made["fitted_on"] == ["h200-sxm"] and made["coefficients"].keys() == stored()["coefficients"].keys()
    assert all(made["coefficients"][name]["tag"] == "fitted" for name in PRIOR)
    assert made["coefficients"]["pipeline_loss"]["tag"] == "guessed"


def test_at_most_twenty_numbers_are_fitted_and_none_by_a_models_name() -> None:
    entries = stored()["coefficients"]
    fitted = [name for name, entry in entries.items() if entry["tag"] == "fitted"]
    assert sorted(fitted) == sorted(PRIOR) and len(fitted) <= 20
    assert all(entry["source"] and isinstance(entry["value"], float | int) for entry in entries.values())
