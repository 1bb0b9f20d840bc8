"""What is measured: which figure, under which load, step by step or by whole loads; and that trials tell figures apart."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideforge.data.workload import RequestShape, Turn, Workload
from tideforge.engine import load as loads
from tideforge.engine import timing
from tideforge.engine.config import Limits, Settings
from tideforge.engine.evaluate import Bench
from tideforge.engine.executor import Sampled
from tideforge.engine.load import Closed, Open
from tideforge.engine.measure import Answer, Block, Interval, Side
from tideforge.engine.objective import Objective
from tideforge.engine.outcome import Outcome, Trial
from tideforge.engine.service_config import ServiceConfig, for_bench, for_trials
from tideforge.errors import UserError

LLAMA = Path(__file__).parents[2] / "engine" / "models" / "llama"
CORPUS = tuple((7 * i + i // 11) % 250 for i in range(2000))
ALONE = tuple(RequestShape(6 + i, 6, arrival_s=2.0 + 0.5 * i) for i in range(8))
TALKS = tuple(RequestShape(20 + i, 4, 0.01 * i, (Turn(7, 4, 30.0), Turn(5, 3, 0.0))) for i in range(8))
SPINS = "\n\n_plain = build\n\n\ndef build(ctx):\n    inner = _plain(ctx)\n\n    def forward(batch):\n        inner(batch)\n"
SPINS += "        if batch.num_{kind}:\n            for _ in range(40):\n                torch.ones(192, 192) @ torch.ones(192, 192)\n\n"
SPINS += "    return forward\n"


def workload_of(shapes: tuple[RequestShape, ...], users: int = 4) -> Workload:
    return Workload(users=users, search=shapes, held_out=shapes, corpus=CORPUS, profile="p", seed=0)


# --- what is chosen


@pytest.mark.parametrize(
    ("objective", "shapes", "by_loads"),
    [
        (Objective(), ALONE, False),
        (Objective("ttft"), ALONE, True),
        (Objective("tps_per_user_p90"), ALONE, True),
        (Objective(arrivals="open"), ALONE, True),
        (Objective(), (*ALONE, TALKS[0]), True),
        (Objective(think_s=0.5), ALONE, True),
        (Objective(think_s=None), ALONE, False),
        (Objective(think_s=None), TALKS, True),
    ],
)
def test_only_output_tokens_of_single_requests_are_timed_step_by_step(objective, shapes, by_loads, monkeypatch) -> None:
    monkeypatch.setattr(timing, "step_passes", lambda bench, prepared: iter(["step by step"] * 9))
    monkeypatch.setattr(timing, "load_passes", lambda bench, prepared: iter(["whole loads"] * 9))
    bench: Any = SimpleNamespace(config=SimpleNamespace(objective=objective, passes=2), workload=workload_of(shapes))
    prepared: Any = None
    assert list(timing.passes(bench, prepared)) == [["step by step", "whole loads"][by_loads]] * 2


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            {"maximize": "joy"},
            "objective.maximize: 'joy' cannot be measured; choose one of output_tps, tps_per_user_p90, ttft",
        ),
        ({"arrivals": "late"}, "objective.arrivals: 'late' cannot be measured; choose one of closed, open"),
        ({"pace": 0.0}, "objective.pace: 0 is no pace"),
        ({"pace": math.inf}, "objective.pace: inf is no pace"),
        ({"think_s": -1.0}, "objective.think_s: -1 s is no pause"),
        ({"think_s": math.nan}, "objective.think_s: nan s is no pause"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(asked, named) -> None:
    with pytest.raises(UserError) as caught:
        Objective(**asked)
    assert str(caught.value).startswith(named) and "\n" not in str(caught.value)


def test_more_is_better_whatever_the_figure() -> None:
    late = Block(2.0, (Answer((1,), (2, 3, 4), (1.0, 1.5, 2.0)),))
    early = Block(2.0, (Answer((1,), (2, 3, 4), (0.5, 1.25, 2.0)),))
    assert Objective("ttft").worth(early) == 2 * Objective("ttft").worth(late) == 2.0
    assert Objective("tps_per_user_p90").worth(late) == 2.0 > Objective("tps_per_user_p90").worth(early)
    assert Objective().worth(late) == Objective().worth(early) == 1.5


def test_a_load_is_drawn_from_the_part() -> None:
    closed = Objective("ttft").load_of(TALKS, 3, 512, random.Random(1))
    assert isinstance(closed, Closed) and closed.users == 3 and len(set(closed.conversations)) == 6
    spoken = {(shape.prompt_tokens, shape.output_tokens) for shape in closed.conversations}
    assert spoken <= {(shape.prompt_tokens, shape.output_tokens) for shape in TALKS}
    assert {turn.think_s for shape in closed.conversations for turn in shape.turns} == {0.0} == {closed.think_s}
    paused = Objective("ttft", think_s=0.5).load_of(TALKS, 3, 512, random.Random(1))
    assert isinstance(paused, Closed) and paused.think_s == 0.5 and paused.pace == 1
    assert {turn.think_s for shape in paused.conversations for turn in shape.turns} == {0.5}
    as_logged = Objective("ttft", "closed", 10.0, None).load_of(TALKS, 3, 512, random.Random(1))
    assert isinstance(as_logged, Closed) and as_logged.pace == 10 and set(as_logged.conversations) <= set(TALKS)
    stretch = Objective("ttft", "open", 5.0).load_of(ALONE, 3, 512, random.Random(1))
    assert isinstance(stretch, Open) and stretch.pace == 5 and len(stretch.conversations) == 6
    assert [shape.arrival_s for shape in stretch.conversations] == [0.5 * i for i in range(6)]
    assert Objective("ttft").load_of(TALKS[:1], 3, 30, random.Random(1)).conversations[0].turns == ()


def test_seconds_that_no_engine_can_save() -> None:
    assert Objective("ttft").scripted_s(TALKS, 4) == 0
    assert Objective("ttft", think_s=0.5).scripted_s(TALKS, 4) == pytest.approx(2 * 2 * 0.5 + 0.5)
    assert Objective("ttft", pace=10.0, think_s=None).scripted_s(TALKS, 4) == pytest.approx(2 * 30 / 10)
    assert Objective("ttft", "open", 2.0).scripted_s(ALONE, 2) == pytest.approx(1.5 / 2)
    assert Objective("ttft", "open").scripted_s(TALKS, 4) == pytest.approx(30.07)


def test_a_bench_has_room_for_whole_conversations_and_open_arrivals(tmp_path: Path) -> None:
    settings = Settings(tmp_path, tmp_path, num_blocks=9999, block_size=16, limits=Limits(max_num_seqs=6))
    assert for_bench(settings, workload_of(ALONE)).num_blocks == 2 * 4 * (2 + 1) + 1
    assert for_bench(settings, workload_of(TALKS)).num_blocks == 2 * 4 * (4 + 1) + 1
    assert for_bench(settings, workload_of(ALONE), Objective(arrivals="open")).num_blocks == 2 * 6 * (2 + 1) + 1
    captured = dataclasses.replace(settings, capture_rows=(1,))
    assert for_trials(captured, workload_of(ALONE)).capture_rows == (1, 2, 4)
    assert for_trials(captured, workload_of(ALONE), Objective(arrivals="open")).capture_rows == (1, 2, 4, 6)


def test_a_service_is_told_the_objective(tmp_path: Path) -> None:
    config = ServiceConfig(Settings(tmp_path, tmp_path), tmp_path, tmp_path, tmp_path, Objective("ttft", "open", 3.0))
    config.write(tmp_path / "service.json")
    assert ServiceConfig.read(tmp_path / "service.json") == config
    raw = json.loads((tmp_path / "service.json").read_text())
    del raw["objective"]
    (tmp_path / "service.json").write_text(json.dumps(raw))
    assert ServiceConfig.read(tmp_path / "service.json").objective == Objective()


# --- when there is enough


def test_passes_end_when_another_would_change_nothing() -> None:
    def decided(ratio: float, low: float, high: float, pairs: int, noise: tuple[float, ...] = ()) -> bool:
        return timing.Timed(Interval(ratio, low, high, pairs), (), 0.1, timing.MIN_LOADS).decided(noise)

    assert decided(1.1, 1.05, 1.15, 4) and not decided(1.1, 1.05, 1.15, 2), "a few pairs decide nothing"
    assert decided(0.96, 0.5, 1.5, 2), "hopeless"
    assert decided(1.0, 0.995, 1.005, 4) and not decided(1.0, 0.98, 1.02, 4)
    assert not decided(1.1, 1.05, 1.15, 4, noise=(0.03,)), "the noise floor is counted in"


# --- by a clock that counts work


class Work:
    """Answers with running numbers. A step costs so many seconds of a clock that nothing else moves."""

    def __init__(self, clock: list[float], prefill_s: float, decode_s: float) -> None:
        self.clock, self.costs, self.token = clock, (prefill_s, decode_s), 0

    def execute(self, step: Any) -> list[Sampled]:
        self.clock[0] += self.costs[0] * step.num_prefills + self.costs[1] * bool(step.num_decodes)
        self.token += 1
        return [Sampled([self.token] * len(step.request_ids))]

    def halt(self) -> None:
        pass


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch):
    """The last pass of a trial of a candidate with these seconds a prefill and a decode beside (1.0, 0.1)."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds + 1e-6  # never too short by a rounding

    monkeypatch.setattr(loads, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep))
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128)

    def timed(
        objective: Objective, shapes: tuple[RequestShape, ...], prefill_s: float, decode_s: float
    ) -> timing.Timed:
        bench: Any = SimpleNamespace(
            config=SimpleNamespace(objective=objective, passes=2), settings=Settings(".", ".", limits=limits, num_blocks=200),
            workload=workload_of(shapes), corpus=CORPUS, incumbent=SimpleNamespace(id="i"),
            incumbent_worker=Work(clock, 1.0, 0.1),
        )  # fmt: skip
        prepared: Any = SimpleNamespace(forward=SimpleNamespace(id="c"), staged=Work(clock, prefill_s, decode_s))
        *_, last = timing.passes(bench, prepared)
        return last

    return timed


LOADS = [("closed", ALONE), ("open", ALONE), ("closed", TALKS), ("open", TALKS)]


@pytest.mark.parametrize(("arrivals", "shapes"), LOADS)
def test_slow_prefills_show_in_first_tokens_and_slow_decodes_do_not(passed, arrivals, shapes) -> None:
    ttft = Objective("ttft", arrivals, pace=0.01)  # nobody waits for anybody, where arrivals are open
    prefills, decodes = passed(ttft, shapes, 2.0, 0.1), passed(ttft, shapes, 1.0, 0.2)
    assert prefills.ratio.high < 0.7 and prefills.ratio.pairs == 4 == len(prefills.blocks)
    assert decodes.ratio.low > prefills.ratio.high + 0.1
    if arrivals == "open" and shapes is ALONE:
        assert decodes.ratio.ratio > 0.9 and prefills.ratio.ratio == pytest.approx(0.5, abs=0.05)


def test_slow_decodes_show_in_tokens_per_user(passed) -> None:
    users = Objective("tps_per_user_p90", "open", pace=0.01)
    assert passed(users, ALONE, 2.0, 0.1).ratio.low > 0.95 and passed(users, ALONE, 1.0, 0.2).ratio.high < 0.6
    assert passed(users, ALONE, 1.0, 0.05).ratio.low > 1.5


def test_turns_reuse_prefixes_and_one_of_them_is_checked(passed) -> None:
    timed = passed(Objective(), TALKS, 1.0, 0.1)
    assert timed.reused and timed.fastest_step_s >= 0.1
    assert len(timed.to_check(3)) == 4 and timed.to_check(3)[-1] in timed.reused
    assert not passed(Objective("ttft"), ALONE, 1.0, 0.1).reused


# --- whole trials


@pytest.fixture
def bench_of(tiny, tmp_path, end_keeper):
    """A bench of a tiny model for an objective and a workload."""
    with contextlib.ExitStack() as opened:

        def make(objective: Objective, shapes: tuple[RequestShape, ...]) -> Bench:
            (tmp_path / "workload.json").write_text(workload_of(shapes).to_json())
            end_keeper(tmp_path / "s")
            settings = Settings(state=tmp_path / "s", model=tiny, num_blocks=64)
            where = tmp_path, LLAMA, tmp_path / "workload.json"
            return opened.enter_context(
                contextlib.closing(Bench(ServiceConfig(settings, *where, objective, tune=False)))
            )

        yield make


def trial(bench: Bench, text: str, tier: str = "slow") -> Trial:
    forward = bench.incumbent.with_file("forward.py", text)
    return bench.evaluate(Trial("t", forward.id, tier, "test", time.time()), forward)


@pytest.mark.timeout(240)
def test_a_trial_tells_what_a_first_token_waits_for(bench_of) -> None:
    bench = bench_of(Objective("ttft", "open", pace=4.0), ALONE)
    source = bench.incumbent.files["forward.py"]
    prefills, decodes = (trial(bench, source + SPINS.format(kind=kind)) for kind in ("prefills", "decodes"))
    assert (prefills.outcome, decodes.outcome) == (Outcome.PASSED,) * 2, (prefills.message, decodes.message)
    assert prefills.figures is not None and decodes.figures is not None
    assert prefills.figures.ratio < 0.7 and decodes.figures.ratio > 1.3 * prefills.figures.ratio
    assert prefills.figures.pairs >= 2
    refused = trial(bench, source + "\n# the same\n", "fast")
    assert refused.outcome is Outcome.REFUSED
    assert refused.message == "the fast tier measures layers' output_tps, not ttft; submit to the slow tier"


@pytest.mark.timeout(240)
def test_conversations_go_through_a_trial(bench_of, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(Objective(), TALKS)
    seen: list[timing.Timed] = []
    monkeypatch.setattr(timing.Timed, "decided", lambda timed, noise: bool(seen.append(timed)))
    source = bench.incumbent.files["forward.py"]
    done = trial(bench, source + "\n# the same\n")
    assert done.outcome is Outcome.PASSED and done.figures is not None, done.message
    assert done.figures.pairs == 4 and len(seen) == 2 and seen[-1].reused and done.figures.candidate_tps > 0
    lost = "\n\n_plain = build\n\n\ndef build(ctx):\n    inner = _plain(ctx)\n\n    def forward(batch):\n        inner(batch)\n"
    lost += "        if batch.num_prefills and batch.positions[0] and not batch.num_decodes:\n"
    lost += "            batch.logits.neg_()\n\n    return forward\n"
    assert trial(bench, source + lost).outcome is Outcome.WRONG, "right with a cold cache only"


def test_sides_of_a_trial_share_no_cache() -> None:
    load = Objective().load_of(TALKS, 4, 512, random.Random(2))
    settings = Settings(".", ".")
    a, b = (Side.of(name, loads.core_for(settings, load), Work([0.0], 1, 1)) for name in "ab")
    assert a.core.pool is not b.core.pool and a.core.pool.prefix_cache
