from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tideforge.data import bench_traffic
from tideforge.data.bench_pandas import pandas_profile
from tideforge.data.days import Days
from tideforge.data.logs import sample_path
from tideforge.data.merge import profile_days
from tideforge.data.profile import NAMES
from tideforge.data.readers import connect
from tideforge.data.traffic_generator import TRACES, Traffic, write_conversations
from tideforge.errors import UserError


def pairs(path: Path) -> set[tuple[int, int]]:
    table = pq.read_table(path, columns=["prompt_tokens", "output_tokens"])
    return set(zip(table["prompt_tokens"].to_pylist(), table["output_tokens"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def three_days(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, traffic = tmp_path_factory.mktemp("log"), Traffic(rows_a_day=3001)
    paths = [folder / f"{number}.parquet" for number in range(3)]
    with connect() as db:
        for number, path in enumerate(paths):
            traffic.write_day(db, number, path)
    return paths


def test_duplicates_are_as_many_as_the_generator_says(three_days: list[Path], tmp_path: Path) -> None:
    with connect() as db:
        doubled = Traffic(rows_a_day=3001).duplicates(db, 3)
    assert doubled > 20
    days = Days(tmp_path)
    days.take(three_days)
    assert profile_days(days).requests == 3 * 3001 - doubled == pandas_profile(three_days)


def test_lengths_are_real_and_the_seed_decides(three_days: list[Path], tmp_path: Path) -> None:
    assert pairs(three_days[0]) <= set().union(*(pairs(sample_path(name)) for name in TRACES))
    with connect() as db:
        Traffic(rows_a_day=3001).write_day(db, 0, tmp_path / "same.parquet")
        Traffic(rows_a_day=3001, seed=1).write_day(db, 0, tmp_path / "other.parquet")
    first = pq.read_table(three_days[0])
    assert pq.read_table(tmp_path / "same.parquet").equals(first)
    assert not pq.read_table(tmp_path / "other.parquet").equals(first)


def test_copies_of_conversations_share_nothing(tmp_path: Path) -> None:
    one, two = (tmp_path / f"{name}.parquet" for name in ("one", "two"))
    number = pq.read_metadata(sample_path("mooncake_conversation")).num_rows
    with connect() as db:
        write_conversations(db, number, one)
        write_conversations(db, 2 * number, two)
    distinct = [
        len(set(pq.read_table(path)["prefix_hashes"].combine_chunks().flatten().to_pylist())) for path in (one, two)
    ]
    assert distinct[1] == 2 * distinct[0]


def test_true_quantiles_count_as_plainly_as_a_list() -> None:
    counts = [(3, 5), (7, 1), (9, 994)]
    ordered = [number for number, times in counts for _ in range(times)]
    found = bench_traffic.true_quantiles(counts)
    ranks = {name: max(0, -int(-float(name[1:]) * 10 // 1) - 1) for name in NAMES}
    assert found == {name: ordered[rank] for name, rank in ranks.items()}


def bench(folder: Path, requests: int = 3000) -> bench_traffic.Bench:
    return bench_traffic.Bench(folder, requests, 100, 100, 1000, 1, 0)


def test_it_refuses_a_folder_that_is_not_its_own_and_a_disk_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(UserError, match="no bench made it"):
        bench_traffic.begin(bench(tmp_path / "mine"))
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
    monkeypatch.setattr(bench_traffic.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(UserError, match="GB free"):
        bench_traffic.begin(bench(tmp_path / "new", 10**7))


def test_a_bench_of_other_numbers_begins_anew(tmp_path: Path) -> None:
    bench_traffic.begin(bench(tmp_path / "b"))
    done = tmp_path / "b" / "results" / "generate.json"
    done.write_text("{}")
    bench_traffic.begin(bench(tmp_path / "b"))
    assert done.exists()
    bench_traffic.begin(bench(tmp_path / "b", 6000))
    assert not done.exists()


@pytest.mark.slow
def test_the_whole_bench_small(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "tideforge.data.bench_traffic", "--requests", "30000", "--pandas-requests", "2000"),
            *("--prefix-requests", "2000", "--folder", str(tmp_path / "b")),
        ],
        capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=True,
    )  # fmt: skip
    made = json.loads(ran.stdout.splitlines()[-1])
    assert made["counts_exact"] and made["pandas_kept_the_same"] and made["quantile_error"] < 0.01
    assert made["p99.9_error"] < 0.02 and not (tmp_path / "b").exists()
