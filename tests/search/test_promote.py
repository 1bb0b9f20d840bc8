"""Which candidates go on from the fast tier to the slow one: the policy, whoever carries it out, and whole short searches."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tideforge.costmodel.rank import OBJECTIVES
from tideforge.data.workload import RequestShape, Turn, Workload
from tideforge.engine import objective as engine_objective
from tideforge.engine.archive import read_trials
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.events import read_events
from tideforge.engine.lab import keeper_status
from tideforge.engine.outcome import FAST, SLOW, Figures, Outcome, Trial
from tideforge.errors import UserError
from tideforge.flows.commands.nodes import search
from tideforge.tasks.corpus import corpus_ids
from tideforge.tasks.endpoint import Endpoint, Objective
from tideforge.tasks.ingest import ingest
from tideforge.tasks.night import open_night
from tideforge.tasks.objective import WORDS, measured, require_short
from tideforge.tasks.profile import profile, workload
from tideforge.tasks.search import promote
from tideforge.tasks.search.board import Board
from tideforge.tasks.search.promote import FEW, TWENTY, Promotion, promoted
from tideforge.tasks.search.session import reserved_s, service_config, tier_of
from tideforge.tasks.store import Run


def trial(name: str, ratio: float | None, tier: str = FAST, half: float = 0.02, outcome: Any = None) -> Trial:
    figures = Figures(ratio, ratio - half, ratio + half, 4, 1, 1, 1, 1, 1) if ratio is not None else None
    outcome = Outcome.PASSED if figures else outcome
    return Trial(f"{tier}-{name}", name, tier, "a", 0.0, outcome, figures=figures)


def names(trials: list[Trial]) -> list[str]:
    return [one.forward for one in trials]


def test_the_best_few_go_on_at_the_end() -> None:
    trials = [trial(f"{ratio:.1f}", ratio) for ratio in (1.1, 1.4, 1.2, 1.3)]
    assert promoted(trials) == [], "more may come"
    assert names(promoted(trials, last=True)) == ["1.4", "1.3", "1.2"]
    assert names(promoted([*trials, trial("1.4", 1.2, SLOW)], last=True)) == ["1.3", "1.2"]


def test_what_failed_or_is_hopeless_never_goes_on() -> None:
    wrong, hopeless, waits = trial("w", None, outcome=Outcome.WRONG), trial("h", 0.9), trial("q", None)
    assert promoted([wrong, hopeless, waits], last=True) == []
    assert names(promoted([wrong, hopeless, trial("perhaps", 0.99)], last=True)) == ["perhaps"]


def test_while_agents_search_one_place_is_kept_for_the_end() -> None:
    trials = [trial(str(index), 1.1 + index / 1000) for index in range(3 * TWENTY)]
    assert promoted(trials[: 2 * TWENTY - 1]) == []
    assert names(promoted(trials)) == ["59", "58"]
    gone = [trial("59", 1.0, SLOW), trial("58", None, SLOW)]
    assert promoted([*trials, *gone]) == [] and names(promoted([*trials, *gone], last=True)) == ["57"]


def test_trials_that_say_nothing_of_a_candidate_open_no_place() -> None:
    good = [trial(str(index), 1.1) for index in range(TWENTY)]
    unjudged = [trial(f"n{index}", None, outcome=Outcome.NOT_MEASURED) for index in range(TWENTY)]
    assert promoted([*good, *unjudged]) == []
    wrong = [trial(f"w{index}", None, outcome=Outcome.WRONG) for index in range(TWENTY)]
    assert len(promoted([*good, *wrong])) == 1


@given(st.lists(st.one_of(st.none(), st.floats(0.5, 2.0)), max_size=130), st.booleans(), st.integers(0, 9))
def test_the_policy_keeps_its_promises(ratios: list[float | None], last: bool, every: int) -> None:
    """Played as a search is: after each trial what the policy says is sent on at once."""
    trials: list[Trial] = []
    for index, ratio in enumerate(ratios):
        trials.append(trial(str(index), ratio, outcome=Outcome.WRONG))
        if every and index % every == 0:
            trials += [trial(one.forward, 1.0, SLOW) for one in promoted(trials)]
    trials += [trial(one.forward, 1.0, SLOW) for one in promoted(trials, last)]
    fast, slow = ([one for one in trials if one.tier == tier] for tier in (FAST, SLOW))
    assert len(set(names(slow))) == len(slow) <= max(FEW if last else 0, len(fast) // TWENTY)
    hopes = [one for one in fast if one.figures and one.figures.ci_high > 1]
    assert {one.forward for one in slow} <= {one.forward for one in hopes}
    if last and hopes and not every:
        assert max(hopes, key=lambda one: one.figures.ratio if one.figures else 0).forward in names(slow)


def test_what_goes_on_is_on_the_board_with_its_rewrites(llama: Any, tmp_path: Path) -> None:
    engine: Any = llama.engine(lambda text: 1.3)
    forward = engine.base.with_file("forward.py", "# better\n" + engine.base.files["forward.py"])
    forward.save(tmp_path / "forwards")
    fast = engine.submit(forward, FAST, "offline-1")
    Board(tmp_path / "board.jsonl").post("offline-1", "hypothesis", "why", fast, ("x", "y"))
    promotion = Promotion(tmp_path, tmp_path / "forwards", engine)
    assert (
        promotion.step() == [] and promotion.step(last=True) == [f"t-{forward.id[:12]}"] and promotion.step(True) == []
    )
    slow = engine.trials()[-1]
    assert (slow.tier, slow.submitter, slow.forward) == (SLOW, "offline-1", forward.id)
    post = promotion.board.posts()[-1]
    assert (post.author, post.trial, post.rewrites) == (promote.NAME, slow.id, ("x", "y"))
    assert "1.300 on the fast tier" in post.text and fast in post.text
    assert [e["fast"] for e in read_events(tmp_path) if e["event"] == "promoted"] == [fast]


def test_a_source_that_was_changed_since_does_not_go_on(llama: Any, tmp_path: Path) -> None:
    engine: Any = llama.engine(lambda text: 1.3)
    forwards = [
        engine.base.with_file("forward.py", mark + engine.base.files["forward.py"]) for mark in ("# a\n", "# b\n")
    ]
    for forward in forwards:
        engine.submit(forward, FAST, "a")
    folder = forwards[0].save(tmp_path / "forwards")
    (folder / "forward.py").write_text("def build(ctx):\n    return None\n")
    assert Promotion(tmp_path, tmp_path / "forwards", engine).step(last=True) == [], "nor one that is gone"
    assert [e["event"] for e in read_events(tmp_path)] == ["not_promoted"] * 2


def test_an_engine_that_is_away_is_asked_again_later(tmp_path: Path) -> None:
    class Away:
        def trials(self) -> None:
            raise UserError("engine.sock", "no engine answers there", "start it")

    away: Any = Away()
    Promotion(tmp_path, tmp_path, away).try_step()
    with pytest.raises(UserError):
        Promotion(tmp_path, tmp_path, away).step()


def test_the_last_ones_get_their_time_and_no_more(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promote, "POLL_S", 0.01)
    engine: Any = llama.engine(lambda text: 1.3)
    engine.known["fast-x"] = Trial("fast-x", "x", FAST, "a", 0.0)
    begin, cancelled = time.monotonic(), []

    def cancel(message: str) -> None:
        cancelled.append((message, time.monotonic() - begin))
        engine.known["fast-x"] = trial("x", None, outcome=Outcome.CANCELLED)

    Promotion(tmp_path, tmp_path, engine).finish(time.time() + 0.6, cancel)
    ((message, after_s),) = cancelled
    assert message == "screening ended before this candidate's turn"
    assert after_s >= 0.19, "a third for what waits on the fast tier"
    assert list(engine.known) == ["fast-x"]


def endpoint_in(folder: Path, layers: int, tier: str, search_s: float = 20) -> Endpoint:
    model = tiny_llama(folder / "model", layers=layers)
    flags = "--dtype float32 --max-num-seqs 8 --max-num-batched-tokens 256 --max-model-len 256"
    raw = {
        "name": "tiny", "model": str(model), "launch": f"tideforge serve --model {model} {flags}",
        "hardware": {"name": "cpu"}, "traffic": {"logs": ["sample:azure_conv_2023"]}, "state": str(folder / "s"),
        "workload": {"users": 4, "prompt_tokens": [8, 16], "output_tokens": 8, "search_output_tokens": 4},
        "budget": {"trial_s": 10, "search_s": search_s}, "search": {"tier": tier},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(raw))
    return Endpoint.load(folder / "tiny.yaml")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, as the paths of sockets must be."""
    made = Path(tempfile.mkdtemp(prefix="tf-"))
    yield made
    with contextlib.suppress(FileNotFoundError):
        if (status := keeper_status(made / "s")) is not None:
            os.kill(status["pid"], signal.SIGTERM)
    shutil.rmtree(made, ignore_errors=True)


def test_a_model_too_short_for_two_depths_is_searched_on_the_slow_tier(folder: Path) -> None:
    short = endpoint_in(folder, layers=1, tier=FAST)
    assert tier_of(short) == (SLOW, "1 layers are too few for two depths; submit to the slow tier")
    assert reserved_s(short, SLOW) == 0 and reserved_s(short, FAST) == 5


def test_another_objective_than_tokens_is_searched_on_the_slow_tier(folder: Path) -> None:
    endpoint = endpoint_in(folder, layers=4, tier=FAST)
    first = endpoint.model_copy(update={"objective": Objective(maximize="ttft")})
    assert tier_of(first) == (SLOW, "the fast tier measures layers' output_tps, not ttft")
    cost = endpoint.model_copy(update={"objective": Objective(maximize="cost", arrivals="open", pace=3)})
    assert tier_of(cost) == (FAST, "") and measured(cost) == engine_objective.Objective("output_tps", "open", 3)
    assert set(WORDS) == set(engine_objective.FIGURES)
    assert {"cost", *engine_objective.FIGURES} == set(OBJECTIVES)


def test_open_arrivals_that_outlast_a_trial_are_refused_with_the_pace_that_they_need(folder: Path) -> None:
    endpoint = endpoint_in(folder, layers=2, tier=SLOW)
    shapes = tuple(RequestShape(6, 4, 10.0 * i) for i in range(8))
    slow = Workload(users=2, search=shapes, held_out=shapes, corpus=(1,) * 99, profile="p", seed=0)
    opened = {
        pace: endpoint.model_copy(update={"objective": Objective(arrivals="open", pace=pace)}) for pace in (1.0, 60.0)
    }
    require_short(endpoint, slow)
    require_short(opened[60.0], slow)
    with pytest.raises(UserError) as caught:
        require_short(opened[1.0], slow)
    most_s = endpoint.budget.trial_s
    assert str(caught.value).endswith(f"give a pace of {4 * 30 / most_s:.3g} or more") and "120 s" in str(caught.value)


def test_pauses_that_outlast_a_trial_are_refused_with_those_that_fit(folder: Path) -> None:
    endpoint = endpoint_in(folder, layers=2, tier=SLOW)
    talks = tuple(RequestShape(6, 4, turns=(Turn(3, 3, 60.0),)) for _ in range(8))
    made = Workload(users=2, search=talks, held_out=talks, corpus=(1,) * 99, profile="p", seed=0)
    most_s = endpoint.budget.trial_s
    for asked, field, remedy in (
        (Objective(think_s=20), "objective.think_s", f"give {most_s / 12:.3g} or less"),
        (Objective(think_s="traffic"), "objective.pace", f"give a pace of {4 * 2 * 60 / most_s:.3g} or more"),
    ):
        with pytest.raises(UserError) as caught:
            require_short(endpoint.model_copy(update={"objective": asked}), made)
        assert field in str(caught.value) and str(caught.value).endswith(remedy)
    for allowed in (Objective(think_s=most_s / 13), Objective(think_s="traffic", pace=4 * 2 * 60 / most_s + 1)):
        require_short(endpoint.model_copy(update={"objective": allowed}), made)


def test_the_tier_is_a_field_of_the_endpoint_file(folder: Path) -> None:
    assert tier_of(endpoint_in(folder, layers=2, tier=FAST)) == (FAST, "")
    file = folder / "tiny.yaml"
    raw = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({name: value for name, value in raw.items() if name != "search"}))
    assert Endpoint.load(file).search.tier == SLOW
    bads = (
        ({"tier": "warp"}, "search.tier"),
        ({"teir": "fast"}, "search.teir"),
        ({"devices": ["gpu0"]}, "search.devices.0"),
    )
    for bad, named in bads:
        file.write_text(yaml.safe_dump({**raw, "search": bad}))
        with pytest.raises(UserError, match=named):
            Endpoint.load(file)


def test_each_device_of_the_endpoint_gets_an_engine(folder: Path) -> None:
    endpoint = endpoint_in(folder, layers=2, tier=SLOW)
    shapes = (RequestShape(6, 4),)
    written = folder / "w.json"
    written.write_text(Workload(1, shapes, shapes, (1, 2), profile="", seed=0).to_json())

    def lanes(devices: list[str]) -> list[str]:
        chosen = endpoint.model_copy(update={"search": endpoint.search.model_copy(update={"devices": devices})})
        config = service_config(chosen, folder, folder, written)
        return [lane.settings.device for lane in config.lanes]

    assert lanes([]) == ["cpu"] and lanes(["cuda:0", "cuda:1"]) == ["cuda:0", "cuda:1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tier", [SLOW, FAST])
def test_a_short_search(folder: Path, tier: str) -> None:
    endpoint = endpoint_in(folder, layers=4, tier=tier)
    run: Run = open_night(endpoint, "n1", "test")
    ingest(run, endpoint)
    profile(run, endpoint)
    workload(run, endpoint, corpus_ids(endpoint))
    manifest = search(run, endpoint)
    trials = read_trials(run.folder)
    fast, slow = ([one for one in trials if one.tier == which] for which in (FAST, SLOW))
    assert {one.tier for one in trials} >= {tier}
    assert [e["tier"] for e in read_events(run.folder) if e["event"] == "search_tier"] == [tier]
    assert sum(manifest.extra["tiers"].values()) == len(trials) and all(one.done for one in trials)
    if tier == SLOW:
        assert not fast and not (run.folder / "fast-noise.json").exists()
    else:
        judged = [one for one in fast if one.outcome is not Outcome.CANCELLED]
        assert len(slow) <= max(FEW, len(judged) // TWENTY) and len(judged) >= 2
        hopes = {one.forward for one in judged if one.figures and one.figures.ci_high > 1}
        assert {one.forward for one in slow} <= hopes and (slow or not hopes)
        posts = [post for post in Board(run.folder / "board.jsonl").posts() if post.author == promote.NAME]
        assert {post.trial for post in posts} == {one.id for one in slow}
    best = manifest.extra["finalist_trial"]
    assert best is None or best in {one.id for one in slow}
    assert json.loads((run.folder / "search.json").read_text())["inputs"]["tier"] == tier


def test_figures_of_the_fast_tier_change_no_choice_of_a_report() -> None:
    from tideforge.tasks.search.search import finalist

    slow, fast = trial("s", 1.1, SLOW), trial("f", 1.9, FAST)
    assert finalist([slow, fast]) == slow
    assert finalist([dataclasses.replace(fast, id="other")]) is None
