"""Parts of the benchmark on a GPU, short. Skipped, with the reason printed, where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"), pytest.mark.slow]


def figures(part: str, state: Path, trials: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "tideforge.engine.bench", part, "--device", "cuda", "--state", str(state), "--trials", str(trials),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return {one["name"]: one["value"] for one in json.loads(done.stdout.splitlines()[-1])[part]["figures"]}


@pytest.mark.timeout(600)
def test_every_harmful_kind_once_on_a_gpu(tmp_path: Path) -> None:
    kinds = len(list((Path(__file__).parents[1] / "redteam").glob("harm*/*.py")))
    found = figures("harm", tmp_path, kinds)
    names = ("service restarts", "weight loads", "lost trials, good ones that failed among them")
    assert found["harmful candidates"] == kinds and [found[name] for name in names] == [0, 0, 0]


@pytest.mark.timeout(600)
def test_swaps_with_and_without_a_new_kernel(tmp_path: Path) -> None:
    found = figures("swap", tmp_path, 6)
    assert found["sources"] == 6 and found["that did not pass"] == 0
    assert 0 < found["no new kernel, median"] < found["restart of this engine"] and found["a new kernel, median"] > 0
