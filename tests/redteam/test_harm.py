"""Candidates can do no harm: each way to misbehave is an outcome of its own, and nothing else notices."""

from __future__ import annotations

import random

import pytest

from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Outcome
from tideforge.errors import ProtocolError

from .conftest import Engine, candidate, harms

HARMS = harms()
CASES = [(name, phase) for name, harm in HARMS.items() for phase in harm.OUTCOMES]
EVERY = 8  # a good candidate after so many harmful ones
MAX_DISK_BYTES = 24 << 20
# In a mixture these come first: a candidate goes on after them, for a while.
QUIET = ("leaves_a_thread", "leaves_a_child", "grows", "prints")


def outcomes(parts: list[tuple[str, str]]) -> set[Outcome]:
    return {Outcome(HARMS[name].OUTCOMES[phase]) for phase, name in parts}


def assert_unharmed(engine: Engine, mark: str) -> None:
    """The next good trial passes, nothing was started again, and nothing is left."""
    trial = engine.ended(engine.good(mark))
    assert trial.outcome is Outcome.PASSED, trial.message
    assert len(engine.events("service_start")) == 1 and not engine.events("service_died")
    assert len(engine.events("weight_load", engine.state)) == 1
    assert not engine.events("incumbent_died")
    assert engine.leftovers() == []
    assert engine.disk_bytes() < MAX_DISK_BYTES


def one_phase(name: str) -> str:
    return random.Random(name).choice(list(HARMS[name].OUTCOMES))


@pytest.mark.timeout(400)
def test_each_kind_of_harm_is_an_outcome_of_its_own(engine: Engine) -> None:
    plain, wrong = engine.client.incumbent(), []
    for index, name in enumerate(HARMS):
        parts = [(one_phase(name), name)]
        trial = engine.ended(engine.submitted(candidate(plain, parts)))
        if {trial.outcome} != outcomes(parts) or not trial.message.isprintable() or trial.figures:
            wrong.append((parts, trial.outcome, trial.message))
        if index % EVERY == EVERY - 1:
            assert_unharmed(engine, f"after {name}")
    assert wrong == []
    assert_unharmed(engine, "after all kinds")


def mixture(seed: int) -> list[tuple[str, str]]:
    """One to three harms that do not end a candidate at once, in the order of their phases, and one more of any kind."""
    rng = random.Random(seed)
    names = [*rng.sample(QUIET, rng.randint(1, 3)), rng.choice(sorted(set(HARMS) - set(QUIET)))]
    return [(rng.choice(list(HARMS[name].OUTCOMES)), name) for name in names]


def assert_a_mixture_is_told(engine: Engine, seed: int) -> None:
    parts = mixture(seed)
    trial = engine.ended(engine.submitted(candidate(engine.client.incumbent(), parts)))
    assert trial.outcome in outcomes(parts), f"{parts}: {trial.outcome}, {trial.message}"
    assert_unharmed(engine, f"after mixture {seed}")


@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_of_harms_is_one_of_their_outcomes(engine: Engine, seed: int) -> None:
    assert_a_mixture_is_told(engine, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 40))
def test_more_mixtures(engine: Engine, seed: int) -> None:
    assert_a_mixture_is_told(engine, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_each_kind_of_harm_in_each_phase(engine: Engine, name: str, phase: str) -> None:
    trial = engine.ended(engine.submitted(candidate(engine.client.incumbent(), [(phase, name)])))
    assert {trial.outcome} == outcomes([(phase, name)]), trial.message
    assert_unharmed(engine, f"after {name} in {phase}")


@pytest.mark.parametrize(
    ("files", "outcome"),
    [
        ({"forward.py": "def build(:\n"}, Outcome.SYNTAX_ERROR),
        ({"forward.py": "-" * 500_000 + "1\n"}, Outcome.SYNTAX_ERROR),
        ({"forward.py": "(" * 100_000}, Outcome.SYNTAX_ERROR),
        ({"forward.py": "x = 1" + " + 1" * 100_000 + "\n"}, Outcome.SYNTAX_ERROR),
        ({"forward.py": "\0"}, Outcome.SYNTAX_ERROR),
        ({"forward.py": "import socket\n"}, Outcome.REFUSED),
        ({"forward.py": "", "knobs.json": "{"}, Outcome.REFUSED),
        ({"forward.py": "", "knobs.json": "[" * 100_000}, Outcome.REFUSED),
        ({"forward.py": "", "knobs.json": "[1]"}, Outcome.REFUSED),
    ],
)  # fmt: skip
def test_source_that_harms_whoever_reads_it(engine: Engine, files: dict[str, str], outcome: Outcome) -> None:
    knobs = engine.client.incumbent().files["knobs.json"]
    trial = engine.ended(engine.submitted(Forward({"knobs.json": knobs, **files})))
    assert trial.outcome is outcome, trial.message
    assert len(engine.events("service_start")) == 1


@pytest.mark.parametrize(
    "names",
    [["forward.py/x.py"], ["a.py", "a.py/b.py"], ["x" * 300 + ".py"], [f"m{i}.py" for i in range(300)], ["../x.py"]],
)
def test_names_that_no_folder_can_hold_are_refused_at_once(engine: Engine, names: list[str]) -> None:
    request = {
        "type": "submit",
        "files": {"forward.py": "", **dict.fromkeys(names, "")},
        "tier": "slow",
        "submitter": "",
    }
    with pytest.raises(ProtocolError, match="CandidateError"):
        engine.client._call(request)
    assert len(engine.client.trials()) == len(list((engine.night / "trials").iterdir()))
