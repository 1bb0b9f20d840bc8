"""Every field of the report comes from files of the night, and says so when a stage did not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tideforge.engine.events import log_event
from tideforge.errors import UserError
from tideforge.flows.cli import cli
from tideforge.tasks import report


def test_figures_come_from_trials_verdict_and_ship_record(made: Any) -> None:
    for event in ("service_start", "worker_start", "worker_start"):
        log_event(made.run.folder, event)
    log_event(made.endpoint.state, "weight_load")
    run = made.run
    search = run.need("search")
    run.finish("search", {}, search.outputs, search.extra, started=9.0)  # ends after the events above
    run.finish("approval", {}, {}, {"decision": "approve", "who": "ada"})
    ship = {"shipped": "f00", "http_tps_before": 50.0, "http_tps_after": 65.0, "failed_requests": 0}
    run.finish("ship", {}, {}, ship)
    facts = report.compute(run)
    assert (facts["service_starts"], facts["worker_starts"], facts["candidates"]) == (1, 2, 2)
    assert facts["weight_loads"] == 2  # a keeper was found running, since workers started before this load
    assert facts["outcomes"] == {"build_error": 1, "passed": 1}
    assert (facts["best_ratio"], facts["ci_low"], facts["ci_high"]) == (1.3, 1.25, 1.35)
    assert facts["finalist_tps"] == 130.0 and facts["incumbent_tps"] == 100.0 and facts["held_out_pairs"] == 3
    assert facts["verified"] and facts["shipped"] == "f00" and facts["result"] == "shipped f00"
    assert facts["http_tps_after"] == 65.0 and facts["failed_requests"] == 0 and facts["approved_by"] == "ada"


def test_a_failed_verdict_or_no_finalist_ends_as_no_candidate_ships(made: Any) -> None:
    run = made.run
    verdict = {**run.read_json(run.need("verify"), "verdict"), "passed": False}
    verdict["gates"][1]["passed"] = False
    run.finish("verify", {}, {"verdict": run.write_json("verdict", verdict)}, {})
    facts = report.compute(run)
    assert facts["failed_gates"] == ["isolation"] and not facts["verified"]
    assert facts["result"] == "no candidate ships: verification failed (isolation)"
    search = run.need("search")
    run.finish("search", {}, search.outputs, {**search.extra, "finalist": None})
    assert report.compute(run)["result"].startswith("no candidate ships: none was faster")


@pytest.mark.parametrize(
    ("events", "idle_s"),
    [
        ([("trial_start", 10.0), ("trial_end", 20.0), ("trial_start", 20.0), ("trial_end", 25.0)], 0.0),
        ([("trial_start", 12.0), ("trial_end", 20.0), ("trial_start", 21.0), ("trial_end", 25.0)], 3.0),
        # the service was killed at some time before 18: the evaluation counts until it is back
        ([("trial_start", 10.0), ("service_start", 18.0), ("trial_start", 18.0), ("trial_end", 25.0)], 0.0),
        ([], 15.0),
    ],
)
def test_idle_time_is_when_a_trial_waits_and_none_is_evaluated(
    made: Any, events: list[tuple[str, float]], idle_s: float
) -> None:
    trials = report.Night.read(made.run).trials  # submitted at 10 and 11, finished at 20 and 25
    assert report.idle_while_queued(trials, [{"event": name, "time": time} for name, time in events]) == idle_s


def test_the_command_prints_one_json_object_and_names_an_unknown_run(made: Any) -> None:
    done = CliRunner().invoke(cli, ["report", str(made.run.folder), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["best_ratio"] == 1.3
    missing = CliRunner().invoke(cli, ["report", "no-such-run"])
    assert missing.exit_code != 0 and "no-such-run" in str(missing.exception)


def test_the_newest_run_of_a_state_folder_is_found_without_an_endpoint_file(made: Any, tmp_path: Path) -> None:
    state = made.run.folder.parent.parent
    for words in ([made.run.id], []):
        done = CliRunner().invoke(cli, ["report", *words, "--state", str(state), "--json"], catch_exceptions=False)
        assert json.loads(done.output.splitlines()[-1])["run"] == made.run.id
    with pytest.raises(UserError, match="holds no run"):
        CliRunner().invoke(cli, ["report", "--state", str(tmp_path / "none")], catch_exceptions=False)
    with pytest.raises(UserError, match="--state FOLDER"):
        CliRunner().invoke(cli, ["report"], catch_exceptions=False)
