"""One Prefect server for all tests of flows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120), contextlib.suppress(RuntimeError):
        yield


@pytest.fixture
def tiny_endpoint(tmp_path: Path) -> Path:
    """Endpoint file of a two-layer random model whose night takes under a minute."""
    from tideforge.engine.doubles import tiny_llama

    model = tiny_llama(tmp_path / "model")
    launch = f"tideforge serve --model {model} --dtype float32 --max-num-seqs 8 --max-num-batched-tokens 256 --max-model-len 256"
    raw = {
        "name": "tiny",
        "model": str(model),
        "launch": launch,
        "hardware": {"name": "cpu"},
        "traffic": {"logs": ["sample:azure_conv_2023"]},
        "workload": {"users": 8, "prompt_tokens": [8, 16], "output_tokens": 8, "search_output_tokens": 4},
        # 4 pairs make the test short, and no more are asked for than are planned; a real release wants 8
        "budget": {"search_s": 20, "trial_s": 10, "verify_s": 120, "search_pairs": 2, "held_out_pairs": 4},
        "agents": [{"name": "offline-1", "seed": 1}, {"name": "offline-2", "seed": 2}],
        "state": str(tmp_path / "s"),
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(raw))))
    return path
