"""The parts of the benchmark at their smallest, as a person calls them; all but the cheapest are slow tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tideforge.engine.bench import running as running_module
from tideforge.engine.bench.job import TINY, Job
from tideforge.engine.bench.report import Record
from tideforge.engine.bench.running import Plan, running
from tideforge.errors import TideforgeError

LARGEST = {"noise": 1, "swap": 2, "steady": 4, "experiments": 2, "harm": 3, "decode": 1, "ship": 1, "tiers": 3}


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tideforge.engine.bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def figures(part: str, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])[part]
    assert all(
        one["prediction"] or one["name"].endswith("most") or part == "decode" for one in told["figures"] if one["unit"]
    )
    assert told["environment"][-1]["torch"] and len(told["environment"]) == len(told["seconds"])
    return {one["name"]: one["value"] for one in told["figures"]}


def measured(part: str, state: Path) -> dict[str, Any]:
    args = ("--device", "cpu", "--state", str(state), "--trials", str(LARGEST[part]))
    return figures(part, bench(part, *args))


@pytest.mark.timeout(300)
def test_a_part_goes_on_where_it_was_and_is_merged_from_its_readings(tmp_path: Path) -> None:
    found = measured("noise", tmp_path)
    assert found["paired trials of equal kernels"] == 1 and found["that did not pass"] == 0
    lines = (tmp_path / "results" / "noise.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "start", "trial", "end"]
    again = bench(
        "noise", "--device", "cpu", "--state", str(tmp_path), "--trials", "1"
    )  # it is complete: nothing starts
    assert "goes on after 4 lines" in again.stdout and figures("noise", again) == found
    assert figures("noise", bench("merge", "--state", str(tmp_path))) == found
    assert not list(tmp_path.glob("noise-*"))  # the service's folder has ended with it


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_swaps_and_a_restart(tmp_path: Path) -> None:
    found = measured("swap", tmp_path)
    assert found["sources"] == 2 and found["that did not pass"] == 0
    assert 0 < found["no new kernel, median"] < found["restart of this engine"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_swaps(tmp_path: Path) -> None:
    found = measured("steady", tmp_path)
    assert found["swaps"] == 4 and found["that did not pass"] == 0
    assert "+-" in found["slope of descriptors"] and found["tokens/s, last / first 50"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_candidates_that_always_wait(tmp_path: Path) -> None:
    found = measured("experiments", tmp_path)
    assert found["slow tier: that did not pass"] == 0
    # One layer of a tiny model: on a busy machine it may seem to take no time at all.
    assert found["fast tier: that did not pass"] in (0, "1 too_fast", "2 too_fast")
    for tier in ("fast", "slow"):
        assert found[f"{tier} tier: trials"] == 2
        assert found[f"{tier} tier: seconds each"] > 0 and found[f"{tier} tier: experiments"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_tiers_on_honest_candidates(tmp_path: Path) -> None:
    found = measured("tiers", tmp_path)
    assert found["llama-tiny: a slow trial from turn to end without its wait for others, most"] > 0
    lines = [json.loads(line) for line in (tmp_path / "results" / "tiers.jsonl").read_text().splitlines()]
    labels = [line["label"].split()[0] for line in lines if line["kind"] == "trial"]
    assert [labels.count(tier) for tier in ("fast", "noise", "slow")] == [3, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_harmful_candidates_between_good_ones(tmp_path: Path) -> None:
    found = measured("harm", tmp_path)
    assert found["harmful candidates"] == 3 and found["other outcomes than expected"] == 0
    names = ("service restarts", "weight loads", "lost trials, good ones that failed among them")
    assert [found[name] for name in names] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_decoding_also_over_http(tmp_path: Path) -> None:
    found = measured("decode", tmp_path)
    assert found["1 user, 8 + 16: decoding / bare replays"] > 0
    assert found["4 users, 16 + 16: over HTTP, whole blocks"] > 0 and found["4 users, 16 + 16: over HTTP, failed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ship_under_load(tmp_path: Path) -> None:
    found = measured("ship", tmp_path)
    assert found["streams open at the flip"] >= 4 and found["failed"] == 0 and found["wrong"] == 0
    assert found["streams in all"] >= 8


def test_bad_arguments_are_one_line_and_exit_2(tmp_path: Path) -> None:
    for args, named in (
        (["swap", "--trials", "0"], "--trials"), (["swap", "--seconds", "0"], "--seconds"),
        (["swap", "--vllm", str(tmp_path / "none")], "is no program"), (["nothing"], "invalid choice"),
    ):  # fmt: skip
        done = bench(*args)
        assert done.returncode == 2 and named in done.stderr.splitlines()[-1] and done.stdout == ""


@pytest.mark.timeout(120)
def test_a_service_that_does_not_start_is_told_at_once(tmp_path: Path, monkeypatch) -> None:
    record, job = Record(tmp_path / "results", "swap"), Job("cpu", tmp_path)
    monkeypatch.setattr(running_module, "MODELS", tmp_path / "none")
    with (
        pytest.raises(TideforgeError, match=r"does not get ready; see .*service\.log"),
        running(job, record, Plan(TINY)),
    ):
        raise AssertionError("it cannot start")
    assert (tmp_path / "swap-1" / "service.log").exists()  # kept, to be read
