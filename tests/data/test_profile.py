from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tideforge.data.distribution import outputs, prompts, rank_correlation
from tideforge.data.files import canonical_json
from tideforge.data.profile import HISTOGRAMS_SCHEMA, make_profile, profile_logs, write_histograms
from tideforge.data.profile_records import ADDED, Profile, bin_edges
from tideforge.data.readers import connect, read_logs
from tideforge.data.schema import LOG_SCHEMA
from tideforge.data.sweep import HOUR_US, held_by_hour
from tideforge.errors import UserError

START = datetime.datetime(2026, 1, 1, 23, 59, tzinfo=datetime.UTC)


def log(path: Path, rows: list[dict[str, Any]]) -> Path:
    full = [
        {"request_id": f"r{number}", "prompt_tokens": 8, "output_tokens": 4, **row} for number, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(full, schema=LOG_SCHEMA), path)
    return path


def at(second: float, **fields: Any) -> dict[str, Any]:
    return {"arrival": START + datetime.timedelta(seconds=second), **fields}


@pytest.fixture(scope="module")
def azure() -> Profile:
    return profile_logs(["sample:azure_conv_2023"])


def test_the_same_log_gives_the_same_hash_wherever_it_lies(tmp_path: Path) -> None:
    rows = [
        at(n * 0.7, prompt_tokens=1 + n % 37, latency_ms=n * 13.7, region="eu" if n % 3 else "us") for n in range(400)
    ]
    one = log(tmp_path / "one.parquet", rows)
    (tmp_path / "sub").mkdir()
    other = Path(shutil.copy(one, tmp_path / "sub" / "zzz.parquet"))
    table = pq.read_table(one)
    pq.write_table(table.slice(200), tmp_path / "sub" / "b.parquet")
    pq.write_table(table.slice(0, 200), tmp_path / "sub" / "c.parquet")
    split = [str(tmp_path / "sub" / name) for name in ("b.parquet", "c.parquet")]
    found = {profile_logs(names).sha256 for names in ([str(one)], [str(other)], split, [str(one), *split])}
    assert len(found) == 1
    rows[7]["prompt_tokens"] = 4096
    assert profile_logs([str(log(tmp_path / "two.parquet", rows))]).sha256 not in found


def test_threads_do_not_change_the_hash(azure: Profile) -> None:
    from tideforge.data.logs import find_logs

    reading = read_logs(find_logs(["sample:azure_conv_2023"]))
    reading.db.execute("SET threads = 1")
    assert make_profile(reading.db).sha256 == azure.sha256


def test_lengths_agree_with_plain_python(azure: Profile) -> None:
    from tideforge.data.logs import sample_path

    table = pq.read_table(sample_path("azure_conv_2023"))
    prompt, output = table["prompt_tokens"].to_pylist(), table["output_tokens"].to_pylist()
    for lengths, values in (
        (azure.prompt, prompt),
        (azure.output, output),
        (azure.context, [*map(sum, zip(prompt, output, strict=True))]),
    ):
        ordered = sorted(values)
        assert (lengths.least, lengths.most, lengths.mean) == (ordered[0], ordered[-1], sum(values) / len(values))
        for name, value in lengths.quantiles.items():
            assert value == ordered[math.ceil(float(name[1:]) / 100 * len(ordered) - 1e-9) - 1], name
    cells: dict[tuple[int, int], int] = {}
    for pair in zip(prompt, output, strict=True):
        cell = (math.floor(4 * math.log2(pair[0])), math.floor(4 * math.log2(pair[1])))
        cells[cell] = cells.get(cell, 0) + 1
    assert {(x, y): n for x, y, n in azure.joint} == cells


def test_bins_meet_without_gap_or_overlap() -> None:
    for length in [*range(1, 5000), 2**20, 2**20 - 1, 2**20 + 1]:
        low, high = bin_edges(math.floor(4 * math.log2(length)))
        assert low <= length < high


def test_arrivals_and_burstiness(tmp_path: Path) -> None:
    even = profile_logs([str(log(tmp_path / "a.parquet", [at(n) for n in range(600)]))]).arrivals
    assert even.per_minute == {"p50": 60, "p90": 60, "p99": 60, "most": 60}
    assert even.dispersion == 0 and even.gap_cv == 0 and even.mean_per_s == pytest.approx(600 / 599)
    bursts = profile_logs([str(log(tmp_path / "b.parquet", [at(180 * (n // 100)) for n in range(600)]))]).arrivals
    assert bursts.per_minute["p50"] == 0 and bursts.per_minute["most"] == 100
    assert bursts.dispersion is not None and bursts.dispersion > 10 and bursts.gap_cv is not None and bursts.gap_cv > 5


def test_concurrency_uses_latency_where_there_is_one(tmp_path: Path) -> None:
    rows = [at(0, latency_ms=10_000.0), at(2, latency_ms=2_000.0), at(4, latency_ms=6_000.0)]
    flight = profile_logs([str(log(tmp_path / "a.parquet", rows))]).concurrency
    assert (flight.p50, flight.p90, flight.most, flight.measured_requests) == (2, 2, 2, 3)
    assert flight.mean == pytest.approx(1.8)
    ruled = profile_logs([str(log(tmp_path / "b.parquet", [at(0, prompt_tokens=4000, output_tokens=100)]))]).concurrency
    assert (ruled.measured_requests, ruled.most) == (0, 1) and "0.25 ms a prompt token" in ruled.rule


def test_one_request_is_a_profile(tmp_path: Path) -> None:
    made = profile_logs([str(log(tmp_path / "a.parquet", [at(0, latency_ms=0.0)]))])
    assert (made.requests, made.span_s, made.arrivals.gap_cv, made.concurrency.mean) == (1, 0.0, None, 0.0)


def test_groups_prefixes_and_timings(tmp_path: Path) -> None:
    rows = [
        at(n, region="eu", model="m", prompt_tokens=100, cached_tokens=50, prefix_hashes=[1, 2], tenant="t")
        for n in range(30)
    ]
    rows += [at(60 + n, region="us", prompt_tokens=900, output_tokens=77, ttft_ms=float(n)) for n in range(10)]
    made = profile_logs([str(log(tmp_path / "a.parquet", rows))])
    assert {name: group.requests for name, group in made.regions.items()} == {"eu": 30, "us": 10}
    assert made.regions["us"].output_p50 == 77 and sum(cell[2] for cell in made.regions["us"].joint) == 10
    assert list(made.models) == ["m"] and {hour: group.requests for hour, group in made.hours.items()} == {
        "23": 30,
        "00": 10,
    }
    assert made.prefixes.cached_share == 0.5 and made.prefixes.repeated_share == pytest.approx(1 - 2 / 60)
    assert made.timings["ttft_ms"]["p50"] == 4.0 and made.tenants == 1


def test_last_hours_counts_from_the_newest_arrival(tmp_path: Path) -> None:
    path = log(tmp_path / "a.parquet", [at(n * 600) for n in range(13)])
    assert profile_logs([str(path)], last_hours=1).requests == 7


def test_a_log_of_bad_rows_has_no_profile(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no good rows"):
        profile_logs([str(log(tmp_path / "a.parquet", [at(0, prompt_tokens=0)]))])


def test_a_profile_file_is_read_back_or_refused(tmp_path: Path, azure: Profile) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(azure.to_json())
    assert Profile.read(path) == azure and Profile.read(path).sha256 == azure.sha256
    value = json.loads(azure.to_json())
    for broken, problem in (
        ({**value, "version": 99}, "version 99"),
        ({"version": 1}, "requests"),
        ([], "not a profile"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(UserError, match=problem):
            Profile.read(path)


def test_no_text_leaks_into_profile_or_histograms(tmp_path: Path) -> None:
    secret = "the launch code is swordfish"
    rows = [at(n, prompt_text=secret, output_text=secret, tenant="acme-corp") for n in range(5)]
    reading = read_logs([log(tmp_path / "a.parquet", rows)])
    write_histograms(reading.db, tmp_path / "h.parquet")
    seen = make_profile(reading.db).to_json().decode() + str(pq.read_table(tmp_path / "h.parquet").to_pylist())
    assert "swordfish" not in seen and "acme" not in seen


def test_histograms_hold_every_request(tmp_path: Path) -> None:
    reading = read_logs([log(tmp_path / "a.parquet", [at(n * 5, region="eu", prompt_tokens=1 + n) for n in range(50)])])
    write_histograms(reading.db, tmp_path / "h.parquet")
    table = pq.read_table(tmp_path / "h.parquet")
    assert table.schema.equals(HISTOGRAMS_SCHEMA)
    query = (
        "SELECT histogram, by_kind, sum(weight)::BIGINT FROM table_ WHERE histogram != 'concurrency_us' GROUP BY ALL"
    )
    db: duckdb.DuckDBPyConnection = connect()
    db.register("table_", table)
    assert set(db.execute(query).fetchall()) == {
        ("joint", "all", 50), ("joint", "region", 50), ("context", "all", 50), ("arrivals_per_minute", "all", 50),
    }  # fmt: skip


def test_interpolated_quantiles_stay_within_a_bin_of_the_exact_ones(azure: Profile) -> None:
    for lengths, binned in ((azure.prompt, prompts(azure.joint)), (azure.output, outputs(azure.joint))):
        for name, exact in lengths.quantiles.items():
            probability = float(name[1:]) / 100
            assert 2**-0.26 < binned.quantile(probability) / exact < 2**0.26
            assert binned.cdf(binned.quantile(probability)) == pytest.approx(probability, abs=1e-9)


def test_rank_correlation_of_the_extremes() -> None:
    assert rank_correlation(tuple((n, n, 5) for n in range(8, 20))) == pytest.approx(1)
    assert rank_correlation(tuple((n, 40 - n, 5) for n in range(8, 20))) == pytest.approx(-1)
    assert rank_correlation(((8, 8, 5),)) == 0


def test_a_silence_of_years_is_closed_up_and_hours_stay(tmp_path):
    import datetime

    import duckdb

    from tideforge.data.profile import make_profile

    def rows(start: datetime.datetime) -> str:
        return (
            f"SELECT TIMESTAMPTZ '{start.isoformat()}' + i * INTERVAL 1 SECOND AS arrival, 'r{start.year}-' || i AS request_id, "
            "10 AS prompt_tokens, 5 AS output_tokens FROM range(600) t(i)"
        )

    from tideforge.data.readers import connect
    from tideforge.data.schema import LOG_SCHEMA

    def profile_of(*starts: datetime.datetime):
        db = connect()
        given = {"arrival", "request_id", "prompt_tokens", "output_tokens"}
        empty = duckdb.from_arrow(LOG_SCHEMA.empty_table(), connection=db)
        empty.create("requests")
        union = " UNION ALL ".join(rows(start) for start in starts)
        db.execute(f"INSERT INTO requests BY NAME SELECT {', '.join(sorted(given))} FROM ({union})")
        return make_profile(db)

    utc = datetime.UTC
    one = profile_of(datetime.datetime(2023, 5, 1, 9, tzinfo=utc))
    two = profile_of(datetime.datetime(2023, 5, 1, 9, tzinfo=utc), datetime.datetime(2026, 5, 1, 15, tzinfo=utc))
    assert one.closed_days == 0 and two.closed_days == 3 * 365 + 1
    assert two.span_s < 86400 and two.concurrency.most == one.concurrency.most
    assert set(two.hours) == {*one.hours, *profile_of(datetime.datetime(2026, 5, 1, 15, tzinfo=utc)).hours}


def test_conversations_are_known_by_their_prefixes(tmp_path: Path) -> None:
    rows = [
        at(0, prompt_tokens=20, output_tokens=5, prefix_hashes=[1, 2], latency_ms=1000.0),
        at(
            1, prompt_tokens=22, output_tokens=5, prefix_hashes=[1, 3]
        ),  # the same system prompt, somebody else's question
        at(11, prompt_tokens=32, output_tokens=5, prefix_hashes=[1, 2, 4], latency_ms=2000.0),  # goes on with the first
        at(12, prompt_tokens=34, output_tokens=5, prefix_hashes=[1, 2, 5]),  # a branch: begins anew
        at(18, prompt_tokens=41, output_tokens=5, prefix_hashes=[1, 2, 4, 6]),  # third turn
        at(30, prompt_tokens=44, output_tokens=5, prefix_hashes=[1, 2, 4, 6]),  # too short for the third turn's answer
        at(31, prompt_tokens=44, output_tokens=5),
    ]
    turns = profile_logs([str(log(tmp_path / "a.parquet", rows))]).turns
    assert turns is not None and turns.continued_share == 2 / 6
    assert (turns.new_tokens["p50"], turns.new_tokens["p99"]) == (4, 7)
    assert (turns.think_s["p50"], turns.think_s["p99"]) == (5.0, 10.0)


def test_without_conversations_a_profile_keeps_its_bytes(azure: Profile) -> None:
    assert azure.turns is None and b"turns" not in azure.to_json()
    assert Profile.from_json(azure.to_json()) == azure


def test_joint_with_the_cached_prefix_by_tenant_and_over_the_day(tmp_path: Path) -> None:
    rows = [
        at(0, prompt_tokens=100, output_tokens=8, cached_tokens=64, tenant="acme", latency_ms=20_000.0, ttft_ms=5000.0),
        at(10, prompt_tokens=100, output_tokens=8, cached_tokens=0, tenant="acme", latency_ms=70_000.0, ttft_ms=5000.0),
        at(50, prompt_tokens=7, output_tokens=2),
    ]
    made = profile_logs([str(log(tmp_path / "a.parquet", rows))])
    prompt_bin = math.floor(4 * math.log2(100))
    assert set(made.joint_cached) == {(prompt_bin, 12, 24, 1), (prompt_bin, 12, -1, 1), (11, 4, -2, 1)}
    assert made.cached is not None and (made.cached.least, made.cached.most, made.cached.mean) == (0, 64, 32.0)
    name = hashlib.sha256(b"acme").hexdigest()[:12]
    assert list(made.by_tenant) == [name] and made.by_tenant[name].requests == 2
    late, early = made.day["23"], made.day["00"]  # the log begins a minute before midnight
    assert (late.requests, late.observed_s, early.requests, early.observed_s) == (3, 60.0, 0, 20.0)
    short = 7 * 0.00025 + 2 * 0.03
    assert late.in_flight_mean == pytest.approx((20 + 50 + short) / 60) and late.in_flight_most == 2
    assert late.decoding_mean == pytest.approx((15 + 45 + 2 * 0.03) / 60)
    assert (early.in_flight_mean, early.in_flight_most) == (1.0, 1)


def test_a_profile_of_version_1_is_read_and_keeps_its_hash(azure: Profile) -> None:
    value = json.loads(azure.to_json()) | {"version": 1}
    for new in ADDED:
        del value[new]
    raw = canonical_json(value)
    assert Profile.from_json(raw).to_json() == raw


spans = st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10)), max_size=40)


@given(spans)
def test_the_sweep_agrees_with_counting_at_every_moment(pairs: list[tuple[int, int]]) -> None:
    """Against the plain count of open spans between every two neighbouring moments."""
    first, last = 10**9, 9 * 10**9
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    ends = np.array([start + length for start, length in pairs], dtype=np.int64)
    moments = {first, last, *(hour * HOUR_US for hour in range(1, 3)), *starts.tolist(), *ends.tolist()}
    inside = sorted(moment for moment in moments if first <= moment <= last)
    expected: dict[tuple[int, int], int] = {}
    for low, high in itertools.pairwise(inside):
        level = sum(start <= low and end >= high for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
        expected[low // HOUR_US, level] = expected.get((low // HOUR_US, level), 0) + high - low
    assert held_by_hour(starts, ends, first, last) == expected
