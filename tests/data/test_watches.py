from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tideforge.data import bench_drift
from tideforge.data.decide import Stakes, refusal
from tideforge.data.drift_alarms import alarms, limits_for
from tideforge.data.drift_rows import write_rows
from tideforge.data.drift_worlds import CASES, WORLDS, make
from tideforge.data.hourly import Hourly, hourly_of
from tideforge.data.logs import find_logs
from tideforge.data.readers import read_logs
from tideforge.data.stack_change import changed
from tideforge.data.watches import (
    DAY,
    FAMILIES,
    HISTORY,
    LEAD,
    WEEK,
    Reference,
    hellinger,
    ratios,
    rolling,
    slope,
    thresholds,
)

NAMES = [case.name.split()[0] for case in CASES]


def judged(case: str, seed: int = 7, rate: int = 2000) -> tuple[np.ndarray, int, int]:
    """(ratios of all watched hours, onset, hour that passes the action threshold)."""
    run = make(WORLDS[0], CASES[NAMES.index(case)], rate, seed)
    found = Reference.of(run.traffic.part(0, HISTORY)).scores(run.traffic.part(HISTORY - LEAD, run.traffic.hours))
    return ratios(found, thresholds(rate))[LEAD:], run.onset - HISTORY, run.passed - HISTORY


@pytest.mark.parametrize("case", ["region", "burst", "trend", "mix", "new"])
def test_each_drift_is_seen(case: str) -> None:
    found, onset, passed = judged(case)
    assert found[onset : passed + 2 * DAY].max() >= 1
    assert len(found) > passed


def test_a_new_tenant_is_seen_by_its_share_alone() -> None:
    found, onset, _ = judged("new")
    hour = onset + int(np.flatnonzero(found[onset:].max(axis=1) >= 1)[0])
    assert FAMILIES[int(found[hour].argmax())] == "arrived"


def test_a_weekend_that_history_knows_is_usual() -> None:
    run = make(WORLDS[0], CASES[1], 2000, 7)
    scores = Reference.of(run.traffic.part(0, HISTORY)).scores(run.traffic.part(HISTORY - LEAD, run.traffic.hours))
    level = np.abs(scores["level"].excess[LEAD:, 0])
    prompts = run.traffic.joint[HISTORY:, 0].sum(axis=2) @ (np.arange(16) + 0.5) / run.traffic.requests[HISTORY:, 0]
    assert np.ptp(prompts) > 0.5 > 0.2 > level.max()


def test_the_same_seed_gives_the_same_traffic_and_others_differ() -> None:
    one, same, other = (make(WORLDS[1], CASES[0], 200, seed).traffic for seed in (1, 1, 2))
    assert np.array_equal(one.joint, same.joint) and not np.array_equal(one.joint, other.joint)
    assert np.array_equal(one.joint[:, 0], one.joint[:, 1:].sum(axis=1))
    for each in one.named[:2]:
        assert np.array_equal(each.counts.sum(axis=1), one.requests[:, 0])


def test_history_must_be_whole_weeks() -> None:
    traffic = make(WORLDS[0], CASES[0], 200, 0).traffic
    with pytest.raises(ValueError, match="not two whole weeks"):
        Reference.of(traffic.part(0, WEEK))
    with pytest.raises(ValueError, match="not two whole weeks"):
        Reference.of(traffic.part(0, 2 * WEEK + 1))
    with pytest.raises(ValueError, match="disagree"):
        dataclasses.replace(traffic, scopes=("all",))


def test_hours_without_requests_are_no_drift() -> None:
    traffic = make(WORLDS[0], CASES[0], 200, 0).traffic
    silent = Hourly(
        traffic.first_hour, traffic.scopes, traffic.joint.copy(), traffic.cached.copy(), traffic.named
    )  # fmt: skip
    silent.joint[HISTORY:] = 0
    silent.cached[HISTORY:] = 0
    scores = Reference.of(silent.part(0, HISTORY)).scores(silent.part(HISTORY - LEAD, HISTORY + 2 * DAY))
    assert all(np.isfinite(scores[family].scores).all() for family in FAMILIES)
    assert scores["level"].excess[-1].tolist() == [0.0] * len(scores["level"].names)


@given(st.integers(1, 30), st.integers(1, 40))
def test_rolling_sums_are_sums(window: int, rows: int) -> None:
    values = np.arange(rows, dtype=float)[:, None]
    expected = [values[max(0, row - window + 1) : row + 1].sum() for row in range(rows)]
    assert rolling(values.copy(), window)[:, 0].tolist() == expected


def test_the_slope_of_a_line_is_its_rise_in_a_week() -> None:
    line = np.arange(20 * DAY, dtype=float)[:, None] / WEEK
    assert slope(line)[6 * DAY :, 0] == pytest.approx(1.0)


def test_the_distance_of_a_shape_to_itself_is_none() -> None:
    counts = np.tile([[30.0, 60.0, 10.0]], (DAY, 1, 1))
    usual = counts / 100
    assert hellinger(counts, np.full((DAY, 1), 100.0), usual, DAY)[-1, 0] == pytest.approx(0)
    other = np.tile([[0.0, 0.0, 1.0]], (DAY, 1, 1))
    assert hellinger(counts, np.full((DAY, 1), 100.0), other, DAY)[-1, 0] == pytest.approx(1 - math.sqrt(0.1))


def test_alarms_have_hysteresis_and_a_pause() -> None:
    assert alarms(np.array([0.9, 1.0, 0.9, 1.1, 0.9, 0.2])) == [1]
    assert alarms(np.array([1.0] + [0.0] * 5 + [1.0] + [0.0] * 20 + [1.0])) == [0, 27]
    assert alarms(np.zeros(9)) == []


def test_thresholds_keep_to_what_was_wanted_and_no_higher_than_needed() -> None:
    rng = np.random.default_rng(0)
    runs = [rng.standard_normal((200, 2)) for _ in range(60)]
    limits = limits_for(runs, 0.4)
    assert np.mean([len(alarms((run / limits).max(axis=1))) for run in runs]) <= 0.4
    lower = limits_for(runs, 2.0)
    assert (lower <= limits).all() and (lower < limits).any()


def test_the_frozen_row_of_the_nearest_rate_holds() -> None:
    raw = json.loads((Path(bench_drift.__file__).with_name("drift_thresholds.json")).read_text())
    assert thresholds(700) == thresholds(2000) == raw["watches"]["2000"] and thresholds(1) == raw["watches"]["200"]
    assert set(raw["watches"]["200"]) == set(FAMILIES) and raw["seeds"] == [0, 99]


def test_rows_in_parquet_give_the_histograms_they_were_made_of(tmp_path: Path) -> None:
    traffic = make(WORLDS[0], CASES[6], 200, 3).traffic.part(0, 3 * DAY)
    rows = write_rows(traffic, 3, tmp_path / "rows.parquet")
    found = hourly_of(read_logs(find_logs([str(tmp_path / "rows.parquet")])).db)
    assert rows == traffic.joint[:, 0].sum()
    assert np.array_equal(found.joint, traffic.joint) and np.array_equal(found.cached, traffic.cached)
    tenants = dict(zip(traffic.named[1].names, traffic.named[1].counts.T, strict=True))
    assert all(
        np.array_equal(tenants[name], counts)
        for name, counts in zip(found.named[1].names, found.named[1].counts.T, strict=True)
    )


def test_a_row_of_the_table_counts_misses_as_infinite() -> None:
    task = bench_drift.Task(0, 2, 200, 1)
    delays = [3.0] * 8 + [math.inf] * 2
    seen = [bench_drift.Seen(task, (0, 0, 0), (delay, 0.0, math.inf), (False,) * 3, "level") for delay in delays]
    row = bench_drift.rows_of(seen)[0]
    assert row["watches"] == {"p50_h": 3.0, "p90_h": None, "missed": 2, "early": 0} and not row["met"]
    assert bench_drift.rows_of(seen[:9])[0]["watches"]["p90_h"] is None
    assert row["psi"]["p90_h"] == 0.0 and "never" in bench_drift.line_of(row)


def test_one_run_goes_the_whole_way_from_parquet() -> None:
    way = [bench_drift.test(bench_drift.Task(0, NAMES.index("burst"), 200, 5, parquet)) for parquet in (False, True)]
    assert way[0].delays == way[1].delays and way[0].first_family == way[1].first_family != ""


def test_a_stack_is_compared_part_by_part() -> None:
    assert changed({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == ["b: 2 to none", "c: none to 3"]
    assert changed({"a": "1"}, {"a": "1"}) == []


def test_a_night_must_pay_and_must_not_follow_too_soon() -> None:
    good, poor = Stakes(0.1, "assumed", 168, 1.0), Stakes(0.001, "assumed", 168, 1.0)
    assert good.worth_hours == pytest.approx(168 * 0.1 / 1.1) and good.pays and not poor.pays
    assert refusal(True, good, None, 12) == "" == refusal(True, good, 12.0, 12)
    assert refusal(False, good, None, 12) == "no drift"
    assert refusal(True, good, 3.0, 12).startswith("cooling down: the last was 3.0 h ago")
    assert refusal(True, poor, None, 12).startswith("not worth it: a gain of 0.1%")
    assert Stakes(-0.5, "measured", 168, 0.0).worth_hours == 0


@pytest.mark.slow
def test_the_quick_table_ends_in_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_drift", "--quick", "--jobs", "1"])
    bench_drift.main()
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    assert len(rows) == len(lines) - 2 == len(CASES) * (len(WORLDS) + 1)
    assert {row["runs"] for row in rows} == {1, 4} and {row["rate"] for row in rows} == {200}
