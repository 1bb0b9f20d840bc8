"""README's GPU table comes from the benchmark's record."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "figures.py"


@pytest.fixture
def figures(tmp_path, monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECORDS", tmp_path)
    return module


def test_every_figure_with_a_goal_is_shown(figures: ModuleType, tmp_path: Path) -> None:
    call = {"commit": "0123456789abcdef", "time": "2026-12-01T10:00:00+00:00", "torch": "2.11.0", "gpu": {
        "name": "NVIDIA H200", "driver_version": "580.1"}}  # fmt: skip
    shown = [
        {"name": "swap, median", "value": 0.4321, "unit": "s", "prediction": "0.3", "goal": "<= 0.5", "met": True},
        {"name": "ratio", "value": 1234.5, "unit": "times", "prediction": "9", "goal": ">= 2000", "met": False},
        {"name": "no goal", "value": 1, "unit": "", "prediction": "1", "goal": "", "met": None},
        {"name": "few", "value": 2.0, "unit": "s", "prediction": "1", "goal": "<= 3", "met": None},
        {"name": "missing", "value": None, "unit": "s", "prediction": "1", "goal": ">= 1", "met": None},
    ]
    record = {"record": {}, "figures": {"swap": {"environment": [call, call], "seconds": [1.0], "figures": shown}}}
    (tmp_path / "engine_h200.json").write_text(json.dumps(record))
    head, _, _, _, *rows = figures.gpu_table().splitlines()
    assert "NVIDIA H200s, a part a GPU, driver 580.1" in head and "2026-12-01, commit 0123456789;" in head
    assert rows == [
        "| swap: swap, median | 0.432 s | 0.3 | <= 0.5, met |",
        "| swap: ratio | 1,234 times | 9 | >= 2000, **missed** |",
        "| swap: few | 2 s | 1 | <= 3, too few readings to say |",
        "| swap: missing | not measured | 1 | >= 1 |",
    ]
