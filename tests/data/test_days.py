"""The log day by day: what is read, what is made anew, and that partials add up to the profile of the whole."""

from __future__ import annotations

import datetime
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tideforge.data import fine
from tideforge.data.days import Days
from tideforge.data.merge import profile_days
from tideforge.data.partial import partial_of, sum_of_squares
from tideforge.data.profile import make_profile
from tideforge.data.profile_records import Profile
from tideforge.data.readers import read_logs
from tideforge.data.schema import LOG_SCHEMA

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=LOG_SCHEMA), path)
    return path


def row(number: int, second: float, **fields: Any) -> dict[str, Any]:
    at = START + datetime.timedelta(seconds=second)
    return {"request_id": f"r{number}", "arrival": at, "prompt_tokens": 8, "output_tokens": 4, **fields}


def profile_of(folder: Path, *files: Path) -> Profile:
    days = Days(folder)
    days.take(files)
    return profile_days(days)


def near(found: dict[str, float] | dict[str, int], exact: dict[str, float] | dict[str, int]) -> None:
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert found[name] == pytest.approx(value, rel=fine.ERROR), name


def assert_same(merged: Profile, exact: Profile) -> None:
    """Counts and sums exact, quantiles within the bound; minutes are the clock's in the one and the log's in the other."""
    same = ("requests", "first_arrival", "span_s", "joint", "joint_cached", "tenants", "concurrency", "day", "prefixes")
    for name in same:
        assert getattr(merged, name) == getattr(exact, name), name
    for name in ("prompt", "output", "context"):
        found, known = getattr(merged, name), getattr(exact, name)
        assert (found.least, found.most, found.mean) == (known.least, known.most, known.mean)
        near(found.quantiles, known.quantiles)
    assert (merged.arrivals.mean_per_s, merged.arrivals.gap_cv) == (exact.arrivals.mean_per_s, exact.arrivals.gap_cv)
    assert merged.timings.keys() == exact.timings.keys()
    for name, timing in exact.timings.items():
        near(merged.timings[name], timing)
    for kind in ("regions", "models", "hours", "by_tenant"):
        found, known = getattr(merged, kind), getattr(exact, kind)
        assert {name: (g.requests, g.joint) for name, g in found.items()} == {
            name: (g.requests, g.joint) for name, g in known.items()
        }
        for name, group in known.items():
            near(figures(found[name]), figures(group))
    assert (merged.turns is None) == (exact.turns is None)
    if merged.turns and exact.turns:
        assert merged.turns.continued_share == exact.turns.continued_share
        near(merged.turns.new_tokens, exact.turns.new_tokens)
        near(merged.turns.think_s, exact.turns.think_s)


def figures(group: Any) -> dict[str, int]:
    return {name: getattr(group, name) for name in ("prompt_p50", "prompt_p90", "output_p50", "output_p90")}


lengths = st.integers(0, 17).flatmap(lambda octave: st.integers(2**octave, 2 ** (octave + 1)))
requests = st.fixed_dictionaries(
    {
        "second": st.integers(0, (2 * 86_400 - 3 * 3600) * 10**6 - 1).map(lambda us: us / 1e6),
        "prompt_tokens": lengths,
        "output_tokens": lengths,
        "cached_share": st.none() | st.floats(0, 1),
        "latency_ms": st.none() | st.integers(0, 3 * 3600 * 10**6).map(lambda us: us / 1e3),
        "ttft_ms": st.none() | st.integers(0, 10**9).map(lambda us: us / 1e3),
        "region": st.sampled_from([None, "eu", "us"]),
        "model": st.sampled_from([None, "m"]),
        "tenant": st.sampled_from([None, "a", "b"]),
        "prefix_hashes": st.none() | st.lists(st.integers(0, 9), max_size=4, unique=True),
    }
)


@settings(max_examples=10, deadline=None)
@given(st.lists(requests, min_size=1, max_size=60), st.integers(1, 3))
def test_partials_add_up_to_the_profile_of_the_whole(drawn: list[dict[str, Any]], parts: int) -> None:
    """Two days without a silence of a day and with nothing in flight at their end, three hours being the longest: so the
    rules at midnight and for silences say of both the same."""
    rows = [row(-1, 43_200), row(-2, 86_400 + 30_000)]
    for number, each in enumerate(drawn):
        share = each["cached_share"]
        given = {key: value for key, value in each.items() if key not in ("second", "cached_share")}
        cached = None if share is None else round(share * each["prompt_tokens"])
        rows.append(row(number, each["second"], **given, cached_tokens=cached))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = [write(folder / f"{part}.parquet", rows[part::parts]) for part in range(parts) if rows[part::parts]]
        assert_same(profile_of(folder / "days", *files), make_profile(read_logs(files).db))


def test_middles_of_bins_are_within_the_bound() -> None:
    for number in [*range(1, 70_000), *(2**n + d for n in range(17, 27) for d in (-1, 0, 1))]:
        middle = fine.middle(math.floor(fine.PER_OCTAVE * math.log2(number)))
        assert abs(middle - number) <= 0.0088 * number
        assert number > 114 or middle == number


def test_squares_are_exact_beyond_64_bits() -> None:
    values = np.array([86_399_999_999, 5, 0, 2**36 + 1] * 3, dtype=np.int64)
    assert sum_of_squares(values) == sum(int(value) ** 2 for value in values)


def test_a_night_reads_only_what_it_has_not_seen(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", [row(n, n * 3600) for n in range(5 * 24)])
    days = Days(tmp_path / "days")
    assert len(days.take([first])) == 1
    before = {day: partial_of(days, day) for day in days.days}
    times = {day: path.stat().st_mtime_ns for day, path in before.items()}
    again = Days(tmp_path / "days")
    late = write(tmp_path / "late.parquet", [row(1000, 86_400 + 5)])
    assert [source.location for source in again.take([first, late])] == [str(late)]
    after = {day: partial_of(again, day) for day in again.days}
    anew = [day for day in after if after[day] != before[day] or after[day].stat().st_mtime_ns != times[day]]
    assert anew == ["2026-01-02", "2026-01-03", "2026-01-04"]  # a day counts for itself and the two behind it
    assert profile_days(again).requests == 5 * 24 + 1
    assert len(list((tmp_path / "days" / "days" / "2026-01-02").glob("partial-*"))) == 1
    assert again.take([first]) == () and profile_days(again).requests == 5 * 24


def test_a_file_that_changed_counts_as_it_is_now(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [row(n, n) for n in range(4)])
    days = Days(tmp_path / "days")
    days.take([path])
    assert profile_days(days).requests == 4
    write(path, [row(n, n) for n in range(7)])
    assert len(days.take([path])) == 1 and profile_days(days).requests == 7
    assert len(days.sources) == 1


def test_duplicates_go_within_a_day_and_against_the_day_before(tmp_path: Path) -> None:
    day = 86_400
    one = write(tmp_path / "a.parquet", [row(1, day - 5), row(1, day - 4), row(2, 10), row(3, 20)])
    two = write(tmp_path / "b.parquet", [row(1, day + 5), row(4, day + 6), row(2, 2 * day + 7)])
    made = profile_of(tmp_path / "days", one, two)
    assert made.requests == 5  # 1, 2, 3, 4, and 2 once more, two days later
    swapped = profile_of(tmp_path / "other", two, one)
    assert swapped.sha256 == made.sha256


def test_who_is_in_flight_at_midnight_counts_on_both_days(tmp_path: Path) -> None:
    rows = [row(1, 86_400 - 600, latency_ms=1200e3), row(2, 86_400 + 900, latency_ms=100e3)]
    days = Days(tmp_path / "days")
    days.take([write(tmp_path / "a.parquet", rows)])
    merged = profile_days(days)
    assert merged.day["23"].in_flight_mean == 1 and merged.day["00"].in_flight_mean == pytest.approx(700 / 1000)
    second = profile_days(days, first="2026-01-02")
    assert second.requests == 1 and second.day["00"].in_flight_mean == pytest.approx(700 / 1000)


def test_days_without_requests_are_left_out(tmp_path: Path) -> None:
    rows = [row(n, n * 60) for n in range(60)] + [row(100 + n, 40 * 86_400 + n * 60) for n in range(60)]
    made = profile_of(tmp_path / "days", write(tmp_path / "a.parquet", rows))
    assert (made.closed_days, made.requests, made.span_s) == (39, 120, 86_400 + 59 * 60)


def test_names_and_ids_do_not_get_into_a_partial(tmp_path: Path) -> None:
    days = Days(tmp_path / "days")
    days.take([write(tmp_path / "a.parquet", [row(7, 5, tenant="acme", prompt_text="swordfish")])])
    seen = str(pq.read_table(partial_of(days, "2026-01-01")).to_pylist())
    assert "acme" not in seen and "swordfish" not in seen and "r7" not in seen


def test_a_day_of_duplicates_alone_adds_nothing(tmp_path: Path) -> None:
    rows = [row(1, 86_400 - 5), row(1, 86_400 + 5)]
    assert profile_of(tmp_path / "days", write(tmp_path / "a.parquet", rows)).requests == 1


def test_bad_rows_are_counted_and_kept_apart(tmp_path: Path) -> None:
    days = Days(tmp_path / "days")
    source = days.take([write(tmp_path / "a.parquet", [row(1, 5), row(2, 6, prompt_tokens=0)])])[0]
    assert (source.good, source.quarantined) == (1, {"prompt_tokens is not positive": 1})
    assert len(list((tmp_path / "days" / "sources").glob("*-quarantine.parquet"))) == 1
