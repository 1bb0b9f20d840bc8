"""Rows in the log, and nothing else, decide what the watch says; every look is written down."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tideforge.errors import UserError
from tideforge.flows.demo import append_shift
from tideforge.tasks.drift import look
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.ingest import ingest
from tideforge.tasks.night import open_night
from tideforge.tasks.profile import profile


@pytest.fixture
def profiled(tmp_path: Path) -> Endpoint:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    logs = {"logs": ["sample:azure_conv_2023"]}
    endpoint = Endpoint.model_validate({**raw, "traffic": logs, "state": str(tmp_path / "s")})
    run = open_night(endpoint, "n1", "test", "")
    ingest(run, endpoint)
    profile(run, endpoint)
    return endpoint


def test_shifted_rows_are_noticed_once_and_their_rows_kept(profiled: Endpoint) -> None:
    calm = look(profiled)
    assert not calm["drifted"] and calm["reason"].startswith("not judged: 0 new requests")
    time.sleep(1.1)
    append_shift(profiled, requests=600)
    found = look(profiled)
    assert found["drifted"] and found["recompile"] and found["new_requests"] == 600 and found["against"] == "n1"
    assert "prompt" in found["reason"] and Path(found["traffic"]).is_file()
    again = look(profiled)
    assert again["drifted"] and not again["recompile"] and again["cooling_down"]
    records = [json.loads(path.read_text()) for path in sorted((profiled.state / "drift").glob("*.json"))]
    assert [one["recompile"] for one in records] == [False, True, False]


def test_without_a_profile_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    with pytest.raises(UserError, match="holds no profile to compare with"):
        look(Endpoint.model_validate({**raw, "state": str(tmp_path)}))
