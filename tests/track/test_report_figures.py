"""Every field of the report comes from files of the night, and says so when a stage did not run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tideforge.engine.measure import interval
from tideforge.engine.release import Decision
from tideforge.errors import UserError
from tideforge.flows.cli import cli, main
from tideforge.tasks import evidence, report


def test_figures_come_from_trials_verdict_and_live_record(made: Any, nights: Any) -> None:
    nights.live(made.run, nights.decided(made.run))
    facts = report.compute(made.run)
    assert (facts["service_starts"], facts["worker_starts"], facts["candidates"]) == (1, 2, 2)
    assert facts["outcomes"] == {"build_error": 1, "passed": 1}
    noise = 31.821 * 0.001 * facts["best_ratio"]  # one-sided t of 2 readings, and not below it
    plain = interval([b / a for a, b in ((100, 130), (110, 140), (90, 120))])
    assert facts["best_ratio"] == pytest.approx((1.3 * 14 / 11 * 4 / 3) ** (1 / 3)) == pytest.approx(plain.ratio)
    assert facts["ci_low"] < plain.low < plain.high < facts["ci_high"] < plain.high + noise
    assert facts["finalist_tps"] == 130.0 and facts["incumbent_tps"] == 100.0 and facts["held_out_pairs"] == 3
    assert facts["finalist"] == nights.WINNER.id and facts["incumbent"] == facts["served"] == nights.INCUMBENT.id
    assert facts["verified"] and facts["failed_gates"] == [] and facts["decision"] == "approve"
    assert facts["approved_by"] == "ada", "the name of the key, not the form's"
    assert facts["shipped"] == nights.WINNER.id and facts["result"] == f"shipped {nights.WINNER.id}"
    assert (facts["http_tps_before"], facts["http_tps_after"], facts["failed_requests"]) == (50.0, 62.5, 2)
    assert (facts["incumbent_vs_transformers"], facts["linear_floor_ms"], facts["incumbent_decode_ms"]) == (
        1.05,
        40.0,
        50.0,
    )
    assert (facts["search_objective"], facts["held_out_objective"]) == (None, "output_tps")
    assert (facts["incumbent_vs_transformers_low"], facts["incumbent_vs_transformers_high"]) == (1.01, 1.08)


def test_the_gain_is_of_the_objective_that_was_measured(made: Any) -> None:
    scores = [[2.0, 3.0], [2.0, 3.2], [2.1, 3.0]]
    (made.run.folder / "service.json").write_text(json.dumps({"objective": {"maximize": "ttft"}}))
    raw = {**evidence.output(made.run, made.run.need("verify"), "verdict"), "objective": "ttft", "scores": scores}
    made.run.finish("verify", {}, {"verdict": made.run.write_json("verdict", raw)}, {"passed": True})
    facts = report.compute(made.run)
    assert facts["search_objective"] == facts["held_out_objective"] == "ttft" and facts["finalist_tps"] == 130.0
    assert facts["best_ratio"] == pytest.approx(interval([b / a for a, b in scores]).ratio)


TELLING = {"finalist": "f" * 64, "incumbent": "e" * 64, "served": "e" * 64, "passed": False, "shipped": "f" * 64}
SUMMED = {"http_tps_after": 999.0, "failed_requests": 77, "incumbent_vs_transformers": 9.0, "decision": "reject"}


@pytest.mark.parametrize("node", ["search", "verify", "release", "approval", "ship"])
def test_a_summary_that_was_changed_changes_no_figure(made: Any, nights: Any, node: str) -> None:
    nights.live(made.run, nights.decided(made.run))
    honest, path = report.compute(made.run), made.run.folder / f"{node}.json"
    raw = json.loads(path.read_text())
    raw["extra"] = {
        **raw["extra"],
        **TELLING,
        **SUMMED,
        "who": "mallory",
        "waits": False,
        "problem": "none",
        "why": "x",
    }
    path.write_text(json.dumps(raw))
    assert report.compute(made.run) == honest


@pytest.mark.parametrize("extra", [{"noise": [0.0, 0.0]}, {"tuned_sha256": "0" * 64}])
def test_a_search_record_that_contradicts_its_readings_is_refused(made: Any, extra: dict[str, Any]) -> None:
    path = made.run.folder / "search.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "extra": {**raw["extra"], **extra}}))
    with pytest.raises(UserError, match=r"noise\.json|tuned\.json"):
        report.compute(made.run)


RAW = [
    "verdict-*",
    "baseline-*",
    "live-*",
    "approval-*",
    "release-*",
    "trials-*",
    "endpoint-*",
    "noise.json",
    "tuned.json",
]


HASHED = [*RAW, "trials/000000-a/result.json", "verify.json", "search.json"]


@pytest.mark.parametrize(
    ("name", "damage"), [*itertools.product(HASHED, ("gone", "changed")), ("events.jsonl", "gone")]
)
def test_a_raw_record_that_is_gone_or_changed_is_one_line_and_no_figure(
    made: Any, nights: Any, name: str, damage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.live(made.run, nights.decided(made.run))
    (path,) = made.run.folder.glob(name)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(path.read_text().replace("1", "2") + " ")
    monkeypatch.setattr("sys.argv", ["tideforge", "report", str(made.run.folder), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and len(said.err.splitlines()) == 1
    assert path.name in said.err or "000000-a" in said.err or name in ("search.json", "verify.json")


def other_setting(run: Any, setting: str, **changes: Any) -> None:
    """A trial beside the night's own that was measured against something else."""
    (path,) = run.folder.glob("trials/000000-a/result.json")
    folder = run.folder / "trials" / "000009-c"
    folder.mkdir()
    raw = {**json.loads(path.read_text()), "id": "000009-c", "setting": setting, **changes}
    (folder / "result.json").write_text(json.dumps(raw))


def test_trials_under_another_setting_are_no_part_of_a_night(made: Any) -> None:
    honest = report.compute(made.run)
    other_setting(made.run, "other", forward="f" * 64)
    assert report.compute(made.run) == honest
    assert [trial.id for trial in evidence.read_trials(made.run, None)] == ["000000-a", "000001-b"]
    (made.run.folder / "trials" / "000009-c" / "result.json").write_text("{")
    with pytest.raises(UserError, match=r"000009-c/result\.json: is damaged"):
        report.compute(made.run)


def test_a_trial_that_was_added_under_the_nights_setting_is_refused(made: Any) -> None:
    other_setting(made.run, "")
    with pytest.raises(UserError, match=r"000009-c/result\.json: is missing, was changed or was added"):
        report.compute(made.run)


def test_a_night_of_before_settings_is_reported_as_it_was(made: Any) -> None:
    honest, manifest = report.compute(made.run), made.run.need("search")
    listed = made.run.read_json(manifest, "trials")
    for raw in listed:
        del raw["setting"]
        (made.run.folder / "trials" / raw["id"] / "result.json").write_text(json.dumps(raw))
    outputs = {**manifest.outputs, "trials": made.run.write_json("trials", listed)}
    made.run.finish("search", manifest.inputs, outputs, manifest.extra, manifest.started)
    again = report.compute(made.run)
    assert {k: v for k, v in again.items() if k != "search_s" and k != "wall_s"} == {
        k: v for k, v in honest.items() if k != "search_s" and k != "wall_s"
    }


def test_only_a_trusted_signature_decides(made: Any, nights: Any) -> None:
    nights.live(made.run, nights.decided(made.run))
    (made.run.folder.parent.parent / "approvers.json").write_text("{}")
    facts = report.compute(made.run)
    assert facts["approved_by"] is None and facts["decision"] is None and facts["shipped"] is None
    assert "no trusted approver's signature" in facts["result"]


def test_a_signed_rejection_is_one_whatever_the_form_says(made: Any, nights: Any) -> None:
    nights.decided(made.run, Decision.REJECT)
    facts = report.compute(made.run)
    assert facts["decision"] == "reject" and facts["result"] == "no candidate ships: rejected"


def test_shipped_needs_the_servers_answer_and_its_release_file(made: Any, nights: Any) -> None:
    release = nights.decided(made.run)
    nights.live(made.run, release)
    ship = made.run.need("ship")
    raw = made.run.read_json(ship, "live")
    other = made.run.write_json("live", {**raw, "serves": None, "problem": "the server ended"})
    made.run.finish("ship", {}, {"live": other}, ship.extra)
    facts = report.compute(made.run)
    assert facts["shipped"] is None and facts["result"] == "no candidate ships: the server ended"
    made.run.finish("ship", {}, ship.outputs, ship.extra)
    next((made.run.folder.parent.parent / "releases").iterdir()).unlink()
    with pytest.raises(UserError, match="holds no signed release"):
        report.compute(made.run)


def test_a_verdict_counts_by_its_gates_and_pairs(made: Any) -> None:
    run, verify = made.run, made.run.need("verify")
    whole = run.read_json(verify, "verdict")

    def said(**changed: Any) -> dict[str, Any]:
        run.finish("verify", {}, {"verdict": run.write_json("verdict", {**whole, **changed})}, verify.extra)
        return report.compute(run)

    failed = [{**gate, "passed": gate["name"] != "canary_pages"} for gate in whole["gates"]]
    assert said(gates=failed)["failed_gates"] == ["canary_pages"] and not said(gates=failed)["verified"]
    assert said(gates=failed)["result"] == "no candidate ships: verification failed (canary_pages)"
    slow = [{**gate, "seconds": 0.5} for gate in whole["gates"]]
    assert said(gates=slow, flags=["look"])["gates_s"] == 0.5 * len(slow) and said(flags=["look"])["flags"] == ["look"]
    assert "gates not run" in said(gates=whole["gates"][1:])["result"]
    assert not said(pairs=[[100.0, 99.0], [100.0, 98.0], [100.0, 99.5]])["verified"], "whatever ci_low it states"
    assert said(unverified="out of time")["result"] == "no candidate ships: not verified: out of time"
    with pytest.raises(UserError, match="but the trials choose"):
        said(forward="0" * 64)


def test_the_comparison_with_transformers_is_made_again_from_its_steps() -> None:
    fast, slow = "transformers static cache, sdpa attention", "transformers dynamic cache, sdpa attention"
    seconds = {"raw": [[0.05, 0.05], [0.04, 0.04], [0.05, 0.05]], "linear layers alone": [[0.025] * 2] * 3}
    theirs = {fast: [[0.06] * 2, [0.06] * 2, [0.055] * 2], slow: [[0.5] * 2] * 3}
    found = evidence.beside_transformers({"ratios": [9.0], "lanes_tps": {}, "seconds": {**seconds, **theirs}})
    assert list(found.values()) == pytest.approx([1.2, 1.1, 1.5, 25.0, 50.0]), "against the fastest variant"
    assert set(evidence.beside_transformers({"problem": "transformers is not installed"}).values()) == {None}


def test_loads_of_the_weights_are_counted_from_events_or_unknown(made: Any) -> None:
    run, state = made.run, made.run.folder.parent.parent
    assert report.compute(run)["weight_loads"] is None, "workers started, but no event tells what they mapped"
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    begin, worker, end = run.need("run").started, events[1]["time"], run.need("search").finished

    def counted(*times: float) -> int | None:
        lines = [json.dumps({"time": time, "event": "weight_load"}) for time in times]
        (state / "events.jsonl").write_text("\n".join(lines))
        return report.compute(run)["weight_loads"]

    assert counted(begin - 9, begin - 5) == 1, "the keeper's load, not the one before it"
    assert counted(begin - 5, end) == 2 and counted(worker) == 1
    assert counted(end) is None and counted(begin - 5, end + 1) == 1


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
    trials = report.Found.read(made.run).trials  # submitted at 10 and 11, finished at 20 and 25
    assert report.idle_while_queued(trials, [{"event": name, "time": time} for name, time in events]) == idle_s


def test_trials_that_overlap_are_busy_each_to_its_own_end() -> None:
    told = [("trial_start", "a", 1.0), ("trial_start", "b", 2.0), ("trial_end", "a", 5.0), ("trial_put_back", "b", 7.0)]
    events = [{"event": kind, "trial": trial, "time": time} for kind, trial, time in told]
    assert report.busy_spans(events) == [(1.0, 5.0), (2.0, 7.0)]


def test_the_command_prints_one_json_object_and_names_an_unknown_run(made: Any) -> None:
    done = CliRunner().invoke(cli, ["report", str(made.run.folder), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["best_ratio"] == pytest.approx(1.3017, abs=1e-4)
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
