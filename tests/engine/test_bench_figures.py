"""What the benchmark makes of raw readings: arithmetic on made-up ones, and records that survive an interruption."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tideforge.engine.bench import beside, decode, experiments, harm, harmful, noise, ship, steady, swap, tiers
from tideforge.engine.bench.job import HARM, Job
from tideforge.engine.bench.report import Figure, Reading, Record, table
from tideforge.engine.bench.running import Turns
from tideforge.engine.outcome import Figures, Outcome, Trial


def reading(label: str = "x", run: int = 1, half: float = 0.01, ratio: float = 1.0, **changes: float) -> Reading:
    """A passed trial: submitted at 100, taken up at 100.5, 0.25 s to its clock, 2 s under it, over at 104."""
    found = Figures(ratio, ratio - half, ratio + half, 20, changes.pop("tps", 50.0), 50.0, 1.0, 50.0, 50.0)
    trial = Trial(
        "t", "f", "slow", "bench", 100.0, Outcome.PASSED, figures=found, swap_s=changes.pop("swap_s", 0.25), clock_s=2.0,
        finished_at=104.0,
    )  # fmt: skip
    return Reading(label, run, trial, turn_at=100.5, **changes)


def failed(label: str, outcome: Outcome) -> Reading:
    trial = Trial("t", "f", "slow", "bench", 100.0, outcome, "why", finished_at=101.0)
    return Reading(label, 1, trial, turn_at=100.0)


def value(figures: list[Figure], name: str) -> object:
    (found,) = [figure for figure in figures if figure.name == name]
    return found.value


def test_a_record_goes_on_after_a_kill(tmp_path: Path) -> None:
    record = Record(tmp_path, "swap")
    record.add("run", device="cpu")
    record.add_trial(reading("swap plain", device_mib=7.0))
    with record.path.open("a") as file:
        file.write('{"kind": "trial", "lab')  # torn
    again = Record(tmp_path, "swap")
    assert again.runs == 1 and again.trials("swap") == [reading("swap plain", device_mib=7.0)]
    assert again.trials("other") == [] and again.last("start") is None


def test_times_of_a_trial() -> None:
    one = reading()
    assert one.swap_s == pytest.approx(0.75)  # half a second until its turn, then a quarter
    assert one.timed_by == pytest.approx(102.0)


def test_slopes_are_of_all_runs_each_with_a_level_of_its_own() -> None:
    rng = np.random.default_rng(0)
    runs = [[level + 0.5 * at + rng.normal(0, 0.1) for at in range(40)] for level in (10.0, 500.0)]
    found = steady.slope(runs)
    assert found is not None and found.value == pytest.approx(0.5, abs=4 * found.error) and found.within(0.1) is False
    assert 0 < found.error < 0.01
    flat = steady.slope([[rng.normal(0, 1) for _ in range(200)]])
    assert flat is not None and flat.within(0.1) is True and flat.within(1e-4) is None
    assert steady.slope([[1.0, 2.0]]) is None


def test_the_last_workers_are_set_against_the_first() -> None:
    run = [reading(tps=100.0 if index < 60 else 80.0) for index in range(120)]
    assert steady.edges([run], steady.tokens_per_s) == pytest.approx(0.8)
    assert steady.edges([[]], steady.tokens_per_s) is None


def test_half_widths_cost_time_by_their_square() -> None:
    assert experiments.more_seconds(reading(half=0.02)) == pytest.approx(2.0 * 3)
    assert experiments.more_seconds(reading(half=0.001)) == 0.0  # nothing back for being precise
    assert experiments.more_seconds(failed("x", Outcome.WRONG)) == 0.0


def test_a_pace_is_of_all_stretches(tmp_path: Path) -> None:
    record = Record(tmp_path, "experiments")
    for seconds, trials in ((30.0, 10), (60.0, 20), (1.0, 0)):
        record.add("stretch", tier="fast", seconds=seconds, trials=trials)
    found = experiments.pace(record, "fast", [reading(half=0.02), reading(half=0.01)])
    assert found is not None and found.seconds_each == pytest.approx(3.0) and found.more_s == pytest.approx(3.0)
    assert found.an_hour == pytest.approx(600.0)
    assert experiments.pace(record, "slow", []) is None


def test_vllm_needs_as_many_blocks_as_its_spread_asks_for() -> None:
    blocks = [0.98, 1.0, 1.02]
    start = beside.Started(True, "default", 70.0, {1: {"block_s": blocks}}, "swap")
    assert start.seconds_to(0.01, 1) == pytest.approx((1.96 * 0.02 / 0.01) ** 2)
    assert start.seconds_to(0.5, 1) == pytest.approx(2.0)  # two blocks at least
    assert start.seconds_to(0.01, 64) == 0.0  # it gave no readings of so many users


def test_false_wins_are_counted(tmp_path: Path) -> None:
    record = Record(tmp_path, "noise")
    for ratio in (1.0, 1.005, 1.02, 0.97):  # one interval above 1, one below
        record.add_trial(reading("noise", ratio=ratio))
    found = noise.figures(record)
    assert value(found, "share of false wins") == pytest.approx(25.0) and value(found, "false losses") == 1
    assert value(found, "half-width x sqrt(time)") == pytest.approx(math.sqrt(2.0))
    assert [f.met for f in found if f.name == "share of false wins"] == [False]


def test_swaps_are_set_beside_restarts(tmp_path: Path) -> None:
    record = Record(tmp_path, "swap")
    for seconds in (15.0, 30.0, 45.0):
        record.add("restart", seconds=seconds)
    for index in range(4):
        record.add_trial(reading("swap kernel" if index == 3 else "swap plain", swap_s=1.5 if index == 3 else 0.25))
    record.add("vllm", cold=True, mode="default", told={"first_token_s": 75.0, "users_1": {"users": 1}}, problem="")
    found = swap.figures(record)
    assert value(found, "no new kernel, median") == pytest.approx(0.75)
    assert value(found, "a new kernel, median") == pytest.approx(2.0)
    assert value(found, "restart / swap") == pytest.approx(40.0)
    assert value(found, "vLLM's restart, empty caches / swap") == pytest.approx(100.0)
    assert value(found, "vLLM's restart, filled caches") is None


def test_harm_is_judged_by_what_was_told_and_by_what_came_after(tmp_path: Path) -> None:
    record = Record(tmp_path, "harm")
    for name, told in (("raises", Outcome.FORWARD_ERROR), ("loops", Outcome.CRASHED)):
        record.add_trial(failed("bad", told))
        record.add_trial(reading("good"))
        expected = {"raises": ["forward_error"], "loops": ["hung"]}[name]
        record.add("pair", phase="forward", harm=name, expected=expected, lost="")
    record.add("counts", service_start=1, service_died=0, weight_load=1, incumbent_died=0)
    found = harm.figures(record)
    assert value(found, "service restarts") == 0 and value(found, "weight loads") == 0
    assert value(found, "other outcomes than expected") == 1
    assert "loops in forward: crashed, not hung" in str(found[-1].value)
    assert value(found, "outcome to next good trial's first timed step, median") == pytest.approx(1.0)
    record.add("counts", service_start=2, service_died=1, weight_load=2, incumbent_died=0)
    record.add("pair", phase="forward", harm="loops", expected=["hung"], lost="has not ended")
    found = harm.figures(record)
    names = ("service restarts", "weight loads", "lost trials, good ones that failed among them")
    assert [value(found, name) for name in names] == [2, 1, 1]
    assert [f.met for f in found if f.name in names] == [False] * 3


def test_every_kind_comes_once_a_round_in_turns_of_its_phases() -> None:
    kinds = harmful.kinds(HARM / "harm")
    order = harm.sequence(kinds, 3)
    assert len(order) == 3 * len(kinds) == len({(turn // len(kinds), name) for turn, (_, name) in enumerate(order)})
    loops = {phase for phase, name in order if name == "loops"}
    assert loops == {"import", "build", "forward"}


def test_kinds_for_a_gpu_are_well_formed() -> None:
    pytest.importorskip("triton")
    for name, kind in harmful.kinds(HARM / "harm", HARM / "harm_gpu").items():
        for phase in kind.OUTCOMES:
            assert phase in ("import", "build", "forward", "after", "instead"), name
            for on_gpu in (False, True):
                outcomes = harmful.expected(kind, phase, on_gpu)
                assert outcomes and all(Outcome(outcome) for outcome in outcomes)
        assert set(getattr(kind, "ON_GPU", {})) <= set(kind.OUTCOMES), name


def stream(phase: str, same: bool = True, **changes: object) -> dict[str, object]:
    line = {"phase": phase, "tokens": 32, "first_at": 10.0, "last_at": 20.0, "longest_gap_s": 0.05, "problem": ""}
    return {**line, "same": same, "shortfall": 0.0, "bound": 0.0, **changes}


def test_a_ship_is_judged_stream_by_stream(tmp_path: Path) -> None:
    record = Record(tmp_path, "ship")
    assert value(ship.figures(record), "ship") is None
    for line in (
        stream("quiet"), stream("loaded", longest_gap_s=0.2), stream("loaded", first_at=16.0),
        stream("loaded", same=False, shortfall=0.5, bound=1.0), stream("loaded", same=False, shortfall=2.0, bound=1.0),
        stream("loaded", problem="3 of 32 tokens came", tokens=3),
    ):  # fmt: skip
        record.add("stream", **line)
    record.add("shipped", posted_at=12.0, answered_at=16.0, answer={"flipped_at": 15.0, "finishing": 3})
    found = ship.figures(record)
    assert value(found, "streams open at the flip") == 3
    assert value(found, "failed") == 1 and value(found, "wrong") == 1
    assert value(found, "largest shortfall / bound") == pytest.approx(2.0)
    assert value(found, "longest gap between tokens, ship and all") == pytest.approx(200.0)


def test_decoding_is_set_beside_the_better_mode_of_vllm(tmp_path: Path) -> None:
    record = Record(tmp_path, "decode")
    rates = decode.Rates(1, 32, 128, 570.0, 590.0, 600.0)
    record.add("rates", **dataclasses.asdict(rates))
    for mode, tps in (("default", 600.0), ("full-decode", 430.0)):
        case = {"users": 1, "output_tps": tps, "decode_tps": tps}
        record.add("vllm", cold=False, mode=mode, told={"first_token_s": 35.0, "users_1": case}, problem="")
    found = decode.figures(record)
    assert value(found, "1 user, 32 + 128: engine / vLLM's better mode") == pytest.approx(0.95)
    assert value(found, "1 user, 32 + 128: decoding / bare replays") == pytest.approx(590 / 600)


def test_a_table_shows_prediction_and_goal_beside_each_figure() -> None:
    figures = [
        Figure.at_most("swap", 0.75, "s", "0.4", 0.5),
        Figure("gap", None, "ms", "3"),
        Figure("why", "x" * 60, "", ""),
    ]
    lines = table("swap", figures).splitlines()
    assert lines[2].split() == ["swap", "0.75", "s", "0.4", "<=", "0.5", "MISSED"]
    assert lines[3].split() == ["gap", "not", "measured", "3"]
    assert lines[4] == f"why: {'x' * 60}"


def test_vllm_that_is_absent_or_fails_is_told_and_costs_nothing_else(tmp_path: Path, monkeypatch, capsys) -> None:
    record, job = Record(tmp_path, "swap"), Job("cpu", tmp_path)
    assert not beside.start(job, record, [swap.LOAD]) and record.lines == []
    monkeypatch.setattr(Job, "model", lambda self, shape: tmp_path)
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\necho no vllm here >&2\nexit 2\n")
    fails.chmod(0o755)
    assert not beside.start(dataclasses.replace(job, vllm=fails), record, [swap.LOAD])
    assert "no vllm here" in capsys.readouterr().out and beside.started(record, cold=True) is None
    told = json.dumps({"first_token_s": 3.0, "users_1": {"users": 1, "block_s": [1.0, 1.0]}})
    fails.write_text(f"#!/bin/sh\n[ -n \"$VLLM_CACHE_ROOT\" ] && echo '{told}'\n")
    beside.both(dataclasses.replace(job, vllm=fails), record, [swap.LOAD])
    starts = [beside.started(record, cold) for cold in (True, False)]
    assert [start and start.first_token_s for start in starts] == [3.0, 3.0]
    assert [start and start.within(record) for start in starts] == ["", ""]


def test_what_only_the_decode_part_saw_of_vllm_is_called_so(tmp_path: Path) -> None:
    told = {"first_token_s": 3.0, "users_1": {"users": 1, "block_s": [1.0, 1.0]}}
    Record(tmp_path, "decode").add("vllm", cold=True, mode="default", told=told)
    record = Record(tmp_path, "swap")
    found = beside.started(record, cold=True)
    assert found is not None and found.within(record) == " (as part decode saw it)"
    assert beside.started(record, cold=True, own=True) is None
    assert value(swap.figures(record), "vLLM's restart, empty caches (as part decode saw it)") == 3.0


def test_growth_while_idle_is_of_each_run_alone(tmp_path: Path) -> None:
    record = Record(tmp_path, "steady")
    assert steady.idle_growth(record) is None
    for run, swaps, mib in ((1, 20, 1000.0), (1, 120, 1010.0), (2, 140, 3000.0), (2, 240, 3010.0)):
        record.add("idle", run=run, swaps=swaps, device_mib=mib)
    assert steady.idle_growth(record) == pytest.approx(0.1)


def test_turns_are_read_as_the_events_grow(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    turns = Turns(path)
    path.write_text('{"event": "trial_start", "trial": "a", "time": 1.5}\n{"event": "other"}\n{"event": "trial_st')
    assert turns.of("a", 0.0) == 1.5 and turns.of("b", 9.0) == 9.0
    with path.open("a") as file:
        file.write('art", "trial": "b", "time": 2.5}\n{"event": "trial_start", "trial": "a", "time": 3.5}\n')
    assert turns.of("b", 0.0) == 2.5 and turns.of("a", 0.0) == 3.5  # taken up again after a restart


def test_both_tiers_are_set_beside_the_slow_one(tmp_path: Path) -> None:
    record = Record(tmp_path, "tiers")
    record.add("candidates m", count=4)
    slow = {"a": 1.2, "b": 1.1, "c": 1.0, "d": 0.9}
    fast = {"a": 1.1, "b": 1.3, "c": 1.0, "d": 0.9}  # one of six pairs the wrong way round
    for tier, ratios in (("fast", fast), ("slow", slow)):
        for name, ratio in ratios.items():
            record.add_trial(reading(f"{tier} m {name}", ratio=ratio, half=0.001))
        record.add("stretch", tier=f"{tier} m", seconds=4.0 if tier == "fast" else 40.0, trials=4)
    record.add_trial(reading("noise m", ratio=1.0))
    found = tiers.figures(record)
    assert value(found, "m: candidates on both tiers") == 4
    assert value(found, "m: together / slow alone") == pytest.approx(10 / (1 + 0.05 * 10))
    assert value(found, "m: Kendall's tau over them") == pytest.approx((5 - 1) / 6)
    assert value(found, "m: loss of promoting the top 3") == pytest.approx(0.0)
    assert value(found, "m: ratios on the slow tier") == "0.90 to 1.20"
