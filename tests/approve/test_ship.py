"""An approved release reaches the live server under load; the flips are measured and the open streams checked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import pytest

from tideforge.engine.release import read_approvers
from tideforge.engine.releases import shipped_release
from tideforge.errors import Refused
from tideforge.tasks import live
from tideforge.tasks.approve import decide, prepare_release, read_release
from tideforge.tasks.endpoint import AgentSpec
from tideforge.tasks.incumbent import serving_forward
from tideforge.tasks.report import compute
from tideforge.tasks.ship import Load, releases, roll_back, rollback_release, ship
from tideforge.tasks.store import Run
from tideforge.tasks.verify.plan import required


@pytest.fixture
def long_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model answers in milliseconds, which a busy machine takes to post a flip."""
    monkeypatch.setattr("tideforge.tasks.ship.STREAM_TOKENS", 96)


@pytest.fixture
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the test is not about streams that are open at the flip."""
    monkeypatch.setattr("tideforge.tasks.ship.STREAM_TOKENS", 3)


def approved(place: Any, run: Run) -> Run:
    decide(run, place.endpoint, True, place.code(read_release(run)), why="12 % more, gates green")
    return run


def test_an_approved_release_ships_is_measured_and_can_be_taken_back(place: Any, long_streams: None) -> None:
    first, run, moves = place.serving, approved(place, place.waiting("night-1")), []
    release = read_release(run)
    manifest = ship(run, place.endpoint, moved=lambda *what: moves.append(what[1:3]))

    facts = manifest.extra
    assert facts["shipped"] == release.forward == place.serving, facts["problem"]
    assert facts["failed_requests"] == 0 and facts["wrong_outputs"] == 0
    assert facts["open_streams"] >= 8 and facts["checked_streams"] >= 3 * 8
    told = compute(run)
    assert told["shipped"] == release.forward and told["approved_by"] == "Ann Other" and told["decision"] == "approve"
    assert all(told[name] == facts[name] for name in ("http_tps_before", "http_tps_after", "failed_requests"))
    blocks = run.read_json(manifest, "live")["blocks"]
    assert [block["forward"] for block in blocks] == ["incumbent", "forward", "forward", "incumbent"]
    assert all(block["requests"] == 4 and block["tokens"] == 24 for block in blocks)
    before = [block for block in blocks if block["forward"] == "incumbent"]
    assert facts["http_tps_before"] == pytest.approx(48 / sum(block["seconds"] for block in before))
    assert moves == [("ship", release.forward)]

    (entry,) = releases(place.state)
    assert (entry["n"], entry["who"], entry["why"]) == (1, "Ann Other", "12 % more, gates green")
    late = httpx.post(f"{place.url}/admin/flip", json={"nonce": release.nonce, "to": "incumbent"}, timeout=30)
    assert late.status_code == 409 and "window for flipping is closed" in late.text, "all is measured"
    known = shipped_release(place.state / "releases", read_approvers(place.state / "approvers.json"))
    assert known == release
    assert ship(run, place.endpoint, moved=lambda *_: pytest.fail("a finished node does not run again")) == manifest

    back = rollback_release(place.state, None)
    assert (back.forward, back.incumbent, back.previous) == (first, release.forward, release.nonce)
    roll_back(place.state, back, place.key, "Ann Other", "P90 rose")
    assert place.serving == first == httpx.get(f"{place.url}/version").json()["forward"]
    assert [(entry["decision"], entry["why"]) for entry in releases(place.state)][1] == ("rollback", "P90 rose")


def test_an_interrupted_ship_goes_on_without_a_second_signature(place: Any, short_streams: None) -> None:
    """The node dies right after the server accepted: its next run finds the release and only measures."""
    run = approved(place, place.waiting("night-1"))
    release = read_release(run)
    code = run.read_json(run.need("approval"), "decision")["code"]
    body = {"record": release.to_record(), "code": code}
    assert httpx.post(f"{place.url}/admin/ship", json=body, timeout=30).status_code == 200
    facts = ship(run, place.endpoint, moved=lambda *_: None).extra
    assert facts["shipped"] == release.forward == place.serving and facts["failed_requests"] == 0
    assert facts["http_tps_before"] > 0 and len(releases(place.state)) == 1


def test_the_approved_forward_serves_when_measuring_fails(
    place: Any, short_streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, honest = approved(place, place.waiting("night-1")), live.measure_http
    calls: list[str] = []

    def breaks(url: str, prompts: Any, concurrency: int) -> live.HttpFigures:
        calls.append(place.serving)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return honest(url, prompts, concurrency)

    monkeypatch.setattr(live, "measure_http", breaks)
    with pytest.raises(KeyboardInterrupt):
        ship(run, place.endpoint, moved=lambda *_: None)
    release = read_release(run)
    assert calls == [release.incumbent, release.forward, release.forward, release.incumbent]
    assert place.serving == release.forward


def test_failed_requests_are_counted(place: Any) -> None:
    good, bad = (live.Prompt(tuple(range(3, 11)), 4, model) for model in ("tiny", "another"))
    figures = live.measure_http(place.url, [good, bad, good], 2)
    assert (figures.failed, figures.requests, figures.tokens) == (1, 3, 8)
    with pytest.raises(Refused, match="failed before any flip"):
        live.texts(place.url, [bad])


def stream(text: str, sent_at: float) -> live.Answer:
    return live.Answer(0, text, 4, sent_at, sent_at + 0.25, sent_at + 5)


@pytest.mark.parametrize(
    ("text", "sent_at", "wrong"),
    [("old", 9.0, 0), ("new", 9.0, 1), ("mixed", 9.0, 1), ("old", 10.5, 0), ("new", 10.5, 0), ("mixed", 10.5, 1)],
)
def test_a_stream_must_end_as_the_forward_that_began_it_would(text: str, sent_at: float, wrong: int) -> None:
    flip = live.Flip({"status": 200}, posted_at=10.0, flipped_at=11.0, streams=(stream(text, sent_at),))
    found = live.wrong_streams(flip, {0: frozenset({"old"})}, {0: frozenset({"new"})})
    assert len(found) == wrong and all(repr(text) in one for one in found)
    assert flip.open_streams == 1


def test_a_real_server_that_answers_otherwise_is_caught(place: Any) -> None:
    """The check can fail: texts of other prompts are not accepted for these streams."""
    prompts = tuple(live.Prompt(tuple(range(start, start + 12)), 12, "tiny") for start in (3, 40, 90))
    turned = (*prompts[1:], prompts[0])
    right, other = live.texts(place.url, prompts), live.texts(place.url, turned)
    flip = live.flip_under_streams(place.url, prompts, "/admin/flip", {"nonce": "none", "to": "forward"})
    assert flip.answer["status"] == 409 and len(flip.streams) >= 8
    assert live.wrong_streams(flip, right, right) == []
    assert live.wrong_streams(flip, other, other) != []


def test_the_form_says_how_candidates_ran(place: Any) -> None:
    def shown(run_id: str, mode: str, kind: str, said: str) -> str:
        agents = [AgentSpec(kind=kind, name="a")]
        endpoint = place.endpoint.model_copy(update={"sandbox": mode, "agents": agents})
        run = place.night(run_id, said={"environment": {"sandbox": said}})
        return run.path(prepare_release(run, endpoint), "form").read_text().partition("### Look at")[2]

    assert "🔴" not in shown("night-1", "require", "llm", "bwrap")
    assert "🔴" not in shown("night-2", "prefer", "offline", "bwrap")
    assert "🔴 **sandbox: prefer**" in shown("night-3", "prefer", "llm", "bwrap")
    plain = shown("night-4", "prefer", "offline", "none: bubblewrap is not on PATH")
    assert "🔴 **candidates ran as plain processes** (none: bubblewrap is not on PATH)" in plain


@pytest.mark.parametrize(
    ("verdict", "problem"),
    [
        ({"passed": False, "gates": [{"name": "canary_pages", "passed": False}]}, "verification failed (canary_pages)"),
        ({"forward": "0" * 64}, "another forward"),
        ({"ci_low": 0.99}, "lower bound of the ratio is 0.990"),
    ],
)
def test_nothing_waits_without_a_verified_gain(place: Any, verdict: dict[str, Any], problem: str) -> None:
    run = place.night("night-1", said=verdict)
    manifest = prepare_release(run, place.endpoint)
    assert manifest.outputs == {} and problem in manifest.extra["problem"]
    with pytest.raises(Refused, match="nothing to ship"):
        read_release(run)
    assert problem in ship(run, place.endpoint).extra["problem"]


def test_the_form_shows_what_is_decided(place: Any) -> None:
    endpoint = place.endpoint.model_copy(update={"allow_imports": ["numpy"], "sandbox": "off"})
    gates = [
        {"name": name, "passed": True, "evidence": "", "seconds": 1.25, "figures": {}} for name in sorted(required())
    ]
    gates[0] |= {"unverified": "no room"}
    run = place.night("night-1", {"gates": gates, "flags": ["2.50 times the incumbent: find out why"]})
    manifest = prepare_release(run, endpoint)
    release, text = read_release(run), run.path(manifest, "form").read_text()
    for shown in (release.forward, release.incumbent, "1.3100 times", "[1.2000, 1.4000]", "8 pairs", "canary_pages"):
        assert shown in text
    assert f"🟡 **{gates[0]['name']}** (1.2 s) no room" in text and f"✅ **{gates[1]['name']}** (1.2 s)" in text
    assert "- 🔴 2.50 times the incumbent: find out why\n" in text
    assert "🔴 **allow_imports: numpy**" in text and "🔴 **sandbox: off**" in text
    assert "🔴 **candidates ran as plain processes** (none: nothing is recorded)" in text
    assert "announced downtime 0 s" in text and f"tideforge code {run.id}" in text
    diff = run.path(manifest, "diff")
    assert str(diff) in text and "+# night-1" in diff.read_text()
    assert prepare_release(run, endpoint) == manifest


def test_the_load_draws_from_the_held_out_half_and_repeats_no_prompt(place: Any) -> None:
    from tideforge.data.workload import Workload

    run = place.night("night-1")
    load = Load.of(Workload.read(run.path(run.need("workload"), "workload")), "tiny")
    drawn = [prompt.tokens for prompt in (*load.first, *load.second, *load.streams)]
    assert len(set(drawn)) == len(drawn) and all(token >= 103 for tokens in drawn for token in tokens)
    assert len(load.streams) == 8


def test_a_rollback_goes_only_where_a_signature_stands(place: Any) -> None:
    run = place.waiting("night-1")
    body = {"record": read_release(run).to_record(), "code": place.code(read_release(run))}
    assert httpx.post(f"{place.url}/admin/ship", json=body, timeout=30).status_code == 200
    path = next((place.state / "releases").iterdir())
    path.write_text(path.read_text().replace(read_release(run).incumbent, place.candidate("slipped in").id))
    with pytest.raises(Refused, match="does not fit"):
        rollback_release(place.state, None)
    assert place.serving == read_release(run).forward


def test_a_night_told_to_end_with_the_verdict_can_be_released_later(place: Any) -> None:
    run = place.night("night-1")
    manifest = prepare_release(run, place.endpoint, wanted=False)
    assert manifest.outputs == {} and manifest.extra["waits"] is False
    nothing = ship(run, place.endpoint, moved=lambda *_: pytest.fail("nothing ships")).extra
    assert nothing["shipped"] is None and nothing["failed_requests"] is None, "nothing was measured"
    assert compute(run)["result"] == "no candidate ships: the night was told to end with the verdict"
    assert prepare_release(run, place.endpoint).extra["waits"] is True
    assert compute(run)["result"] == "waits for approval"
    place.waiting("night-2")
    with pytest.raises(Refused, match="superseded"):
        approved(place, run)


def test_without_a_server_the_incumbent_is_what_one_would_start_with(place: Any) -> None:
    run = place.waiting("night-1")
    release = read_release(run)
    body = {"record": release.to_record(), "code": place.code(release)}
    assert httpx.post(f"{place.url}/admin/ship", json=body, timeout=30).status_code == 200
    told = place.state / "server.json"
    told.write_text(json.dumps({**json.loads(told.read_text()), "forward": release.incumbent}))
    assert serving_forward(place.endpoint).id == release.forward, "the server itself is asked"
    told.unlink()
    assert serving_forward(place.endpoint).id == release.forward
    other = place.endpoint.model_copy(update={"launch": "tideforge serve --other"})
    assert serving_forward(other).id == release.incumbent


def test_a_ship_whose_measuring_is_refused_closes_the_window_too(
    place: Any, short_streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = approved(place, place.waiting("night-1")), []
    honest = live.measure_http

    def breaks(url: str, prompts: Any, concurrency: int) -> live.HttpFigures:
        calls.append(place.serving)
        if len(calls) == 2:
            raise Refused("the server failed")
        return dataclasses.replace(honest(url, prompts, concurrency), failed=1)

    monkeypatch.setattr(live, "measure_http", breaks)
    release, manifest = read_release(run), ship(run, place.endpoint, moved=lambda *_: None)
    facts, told = manifest.extra, compute(run)
    assert facts["shipped"] == release.forward == place.serving and facts["problem"] == "the server failed"
    kept = run.read_json(manifest, "live")
    assert [block["forward"] for block in kept["blocks"]] == ["incumbent"] and len(kept["flips"]) == 1
    assert facts["failed_requests"] == told["failed_requests"] == 1, "the one that failed before the refusal"
    assert facts["http_tps_before"] == told["http_tps_before"] > 0 and told["http_tps_after"] is None
    assert told["shipped"] == release.forward
    late = httpx.post(f"{place.url}/admin/flip", json={"nonce": release.nonce, "to": "incumbent"}, timeout=30)
    assert late.status_code == 409 and place.serving == release.forward


def test_an_unreadable_file_among_the_releases_stops_no_ship(
    place: Any, short_streams: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = place.state / "releases" / "0001-damaged.json"
    bad.parent.mkdir()
    bad.write_text("{")
    run = approved(place, place.waiting("night-1"))
    assert ship(run, place.endpoint, moved=lambda *_: None).extra["shipped"] == place.serving
    assert [entry["n"] for entry in releases(place.state)] == [2] and bad.read_text() == "{"
    assert str(bad) in capsys.readouterr().err
