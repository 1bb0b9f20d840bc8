"""The record of a trial: what JSON is one, and how its figures name what they are of."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tideforge.engine.measure import Answer, Block
from tideforge.engine.objective import FIGURES, Objective
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.errors import UserError
from tideforge.flows.commands.engine import line
from tideforge.tasks.search.tools import told

FIG = Figures(1.25, 1.2, 1.3, 8, 50.0, 40.0, 9.0, 8.0, 7.0, "ttft", "less", "ms", 80.0, 100.0)
TRIAL = Trial("000000-a", "f", "slow", "x", 1.0, Outcome.PASSED, "", FIG, finished_at=2.0, setting="s")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_a_trial_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / TRIAL.id / "result.json"
    path.parent.mkdir()
    path.write_text(TRIAL.to_json())
    assert Trial.read(path) == TRIAL
    other = path.rename(path.parent / "kept.json").rename(tmp_path / "result.json")
    with pytest.raises(UserError, match="it is of the trial 000000-a"):
        Trial.read(other)


def test_a_trial_of_before_has_neither_setting_nor_objective() -> None:
    raw = json.loads(TRIAL.to_json())
    del raw["setting"]
    raw["figures"] = {name: raw["figures"][name] for name in ("ratio", "ci_low", "ci_high", "pairs", "candidate_tps",
                      "incumbent_tps", "ttft_ms", "tps_per_user_p50", "tps_per_user_p90")}  # fmt: skip
    old = Trial.of(raw)
    assert old.setting == "" and old.figures is not None and old.figures.objective == ""
    assert "not written down: 50.0 output tokens/s" in line(old) and "output_tps" not in line(old)


@settings(max_examples=80, deadline=None)
@given(where=st.sampled_from(["", "figures"]), name=st.text(max_size=5), value=JSON, data=st.data())
def test_whatever_stands_in_a_record_is_a_trial_or_refused(where: str, name: str, value: Any, data: Any) -> None:
    raw = json.loads(TRIAL.to_json())
    part = raw[where] if where else raw
    part[data.draw(st.sampled_from([*sorted(part), name]))] = value
    try:
        found = Trial.of(raw)
    except (ValueError, TypeError):
        return
    assert json.loads(found.to_json()) == raw
    assert line(found).startswith(f"{found.id}  ") and told(found)


def block(seconds: float, *waits: float) -> Block:
    """A token after each wait, and one more 0.1 s later."""
    return Block(seconds, tuple(Answer((1,), (1, 2), (wait, wait + 0.1)) for wait in waits))


SLOW, FAST = block(2.0, 0.2, 0.4), block(1.0, 0.1, 0.2)
UNITS = {"output_tps": ("more", "tokens/s", 4.0, 2.0), "tps_per_user_p90": ("more", "tokens/s per user", None, None),
         "ttft": ("less", "ms", 190.0, 380.0)}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figures_name_their_objective_direction_and_unit(name: str) -> None:
    objective = Objective(name)
    figures = dataclasses.replace(FIG, **objective.told([(SLOW, FAST)] * 3))
    better, unit, candidate, incumbent = UNITS[name]
    assert (figures.objective, figures.better, figures.unit) == (name, better, unit)
    assert figures.candidate is not None and figures.incumbent is not None
    if candidate is not None and incumbent is not None:
        assert figures.candidate == pytest.approx(candidate) and figures.incumbent == pytest.approx(incumbent)
    assert (figures.candidate < figures.incumbent) is (better == "less"), "the candidate is faster"
    said = f"times as good by {name} ({better} is better): {figures.candidate:.4g} {unit} against the incumbent's "
    assert said + f"{figures.incumbent:.4g}" in figures.told
    assert json.loads(dataclasses.replace(TRIAL, figures=figures).to_json())["figures"]["objective"] == name


@pytest.mark.parametrize("name", FIGURES)
def test_a_ratio_above_one_is_the_better_candidate_by_every_objective(name: str) -> None:
    rng, objective = random.Random(5), Objective(name)
    for _ in range(20):
        slow = block(rng.uniform(1, 2), rng.uniform(0.2, 0.3), rng.uniform(0.2, 0.3))
        scale = rng.uniform(0.3, 0.9)
        fast = Block(slow.seconds * scale, tuple(
            dataclasses.replace(one, times_s=tuple(scale * at for at in one.times_s)) for one in slow.answers
        ))  # fmt: skip
        assert objective.worth(fast) / objective.worth(slow) > 1
        shown = objective.told([(slow, fast)])
        own = shown["candidate"] / shown["incumbent"]
        assert (own if shown["better"] == "more" else 1 / own) == pytest.approx(
            objective.worth(fast) / objective.worth(slow)
        )
