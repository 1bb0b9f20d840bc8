"""Approval cannot be bypassed: each attempt ships nothing and says why. Against the real server, over HTTP."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tideforge.engine import release as rel
from tideforge.engine.release import Decision, Release
from tideforge.errors import Refused
from tideforge.tasks.approve import decide, prepare_release, read_release
from tideforge.tasks.ship import releases, ship
from tideforge.tasks.store import Run


def post(place: Any, release: Release | dict[str, Any], code: str, path: str = "/admin/ship") -> httpx.Response:
    record = release.to_record() if isinstance(release, Release) else release
    return httpx.post(place.url + path, json={"record": record, "code": code}, timeout=30)


def unverified(place: Any, release: Release) -> tuple[Any, str]:
    """A forward that nobody verified, in a record signed for the verified one."""
    return dataclasses.replace(release, forward=place.candidate("unverified").id), place.code(release)


def changed_file(place: Any, release: Release) -> tuple[Any, str]:
    path = place.state / "forwards" / release.forward / "forward.py"
    path.write_text(path.read_text() + "\n# one line more\n")
    return release, place.code(release)


def changed_knob(place: Any, release: Release) -> tuple[Any, str]:
    (place.state / "forwards" / release.forward / "knobs.json").write_text('{"threads": 2}')
    return release, place.code(release)


def rejected(place: Any, release: Release) -> tuple[Any, str]:
    return release, place.code(release, Decision.REJECT)


def expired(place: Any, release: Release) -> tuple[Any, str]:
    old = dataclasses.replace(release, expires_at=int(time.time()) - 5)
    return old, place.code(old)


def stale(place: Any, release: Release) -> tuple[Any, str]:
    other = dataclasses.replace(release, incumbent="0" * 64)
    return other, place.code(other)


def other_weights(place: Any, release: Release) -> tuple[Any, str]:
    other = dataclasses.replace(release, weights_sha256="0" * 64)
    return other, place.code(other)


def other_launch(place: Any, release: Release) -> tuple[Any, str]:
    other = dataclasses.replace(release, launch=release.launch + " --threads 2")
    return other, place.code(other)


def other_environment(place: Any, release: Release) -> tuple[Any, str]:
    pairs = tuple((name, "0" if name == "torch" else value) for name, value in release.environment)
    other = dataclasses.replace(release, environment=pairs)
    return other, place.code(other)


def unsigned(place: Any, release: Release) -> tuple[Any, str]:
    return release, ""


def nonsense(place: Any, release: Release) -> tuple[Any, str]:
    return release, "please"


def stranger(place: Any, release: Release) -> tuple[Any, str]:
    private_key = rel.create_key(place.state.parent / "stranger.pem", "x")
    return release, rel.sign(private_key, release, Decision.APPROVE, "Ann Other")


def borrowed_name(place: Any, release: Release) -> tuple[Any, str]:
    """A stranger's signature under the trusted key's id."""
    private_key = rel.create_key(place.state.parent / "stranger.pem", "x")
    signature = rel.sign(private_key, release, Decision.APPROVE, "Ann Other").partition(".")[2]
    return release, f"{rel.key_id(rel.public_bytes(place.key))}.{signature}"


def other_run(place: Any, release: Release) -> tuple[Any, str]:
    return release, place.code(dataclasses.replace(release, run="another-night"))


def changed_record(place: Any, release: Release) -> tuple[Any, str]:
    return dataclasses.replace(release, expires_at=release.expires_at + 1), place.code(release)


def changed_verdict(place: Any, release: Release) -> tuple[Any, str]:
    return dataclasses.replace(release, verdict_sha256="0" * 64), place.code(release)


def changed_gain(place: Any, release: Release) -> tuple[Any, str]:
    return dataclasses.replace(release, gain=rel.Gain("9.0000", "8.0000", "9.9000", 8)), place.code(release)


def more_fields(place: Any, release: Release) -> tuple[Any, str]:
    return {**release.to_record(), "approved": True}, place.code(release)


def superseded(place: Any, release: Release) -> tuple[Any, str]:
    place.waiting("night-2")
    return release, place.code(release)


ATTEMPTS: list[tuple[Callable[[Any, Release], tuple[Any, str]], str]] = [
    (unverified, "does not fit"),
    (changed_file, "do not hash"),
    (changed_knob, "do not hash"),
    (rejected, "signs reject, not approve"),
    (expired, "expired"),
    (stale, "stale"),
    (other_weights, "weights_sha256 differs"),
    (other_launch, "launch differs"),
    (other_environment, "environment differs from the approved one in torch"),
    (unsigned, "no signature"),
    (nonsense, "no signature"),
    (stranger, "not among this server's approvers"),
    (borrowed_name, "does not fit"),
    (other_run, "does not fit"),
    (changed_record, "does not fit"),
    (changed_verdict, "does not fit"),
    (changed_gain, "does not fit"),
    (more_fields, "fields differ"),
    (superseded, "superseded"),
]


@pytest.mark.parametrize(("attempt", "reason"), ATTEMPTS, ids=[attempt.__name__ for attempt, _ in ATTEMPTS])
def test_the_server_refuses_and_says_why(place: Any, attempt: Callable[..., Any], reason: str) -> None:
    before = place.serving
    answer = post(place, *attempt(place, read_release(place.waiting("night-1"))))
    assert answer.status_code in (403, 409)
    assert reason in answer.json()["error"]["message"]
    assert place.serving == before and releases(place.state) == []


def test_a_code_works_once_and_only_on_its_path(place: Any) -> None:
    first, release = place.serving, read_release(place.waiting("night-1"))
    code = place.code(release)
    assert "signs approve, not rollback" in post(place, release, code, "/admin/rollback").text
    assert post(place, release, code).status_code == 200
    assert place.serving == release.forward
    assert "used before" in post(place, release, code).text
    back = dataclasses.replace(release, forward=first, incumbent=release.forward, nonce="b")
    assert post(place, back, place.code(back, Decision.ROLLBACK), "/admin/rollback").status_code == 200
    answer = post(place, release, code)
    assert "used before" in answer.json()["error"]["message"] and place.serving == first


def test_flips_are_bound_to_the_release_just_shipped(place: Any) -> None:
    release = read_release(place.waiting("night-1"))

    def flip(nonce: str, to: str) -> httpx.Response:
        return httpx.post(f"{place.url}/admin/flip", json={"nonce": nonce, "to": to}, timeout=30)

    before = place.serving
    assert "shipped last" in flip(release.nonce, "forward").text and place.serving == before
    assert post(place, release, place.code(release)).status_code == 200
    assert "shipped last" in flip("another", "incumbent").text
    assert flip(release.nonce, "somewhere").status_code >= 400
    assert place.serving == release.forward
    assert flip(release.nonce, "incumbent").status_code == 200 and place.serving == release.incumbent


def refused_ship(place: Any, run: Run, reason: str) -> None:
    before = place.serving
    manifest = ship(run, place.endpoint, moved=lambda *_: pytest.fail("the champion must not move"))
    assert manifest.extra["shipped"] is None and reason in manifest.extra["problem"]
    assert place.serving == before and releases(place.state) == []


def approved(place: Any, run: Run) -> Run:
    decide(run, place.endpoint, True, place.code(read_release(run)), "Ann", "faster")
    return run


def test_the_ship_node_ships_nothing_that_nobody_approved(place: Any) -> None:
    refused_ship(place, place.waiting("night-1"), "nobody has approved")


def test_the_ship_node_ships_nothing_that_was_rejected(place: Any) -> None:
    run = place.waiting("night-1")
    code = place.code(read_release(run), Decision.REJECT)
    decide(run, place.endpoint, False, code, "Bob", "the diff is unreadable")
    refused_ship(place, run, "rejected by Ann Other: the diff is unreadable")
    with pytest.raises(Refused, match="decided already: reject"):
        decide(run, place.endpoint, True, place.code(read_release(run)))


def test_the_ship_node_ships_nothing_superseded(place: Any) -> None:
    run = approved(place, place.waiting("night-1"))
    place.waiting("night-2")
    refused_ship(place, run, "superseded: the newer night night-2")


def test_the_ship_node_ships_nothing_stale(place: Any) -> None:
    run = approved(place, place.waiting("night-1"))
    stranger_release = read_release(place.waiting("night-2"))
    (run.folder / "superseded.json").unlink()
    assert post(place, stranger_release, place.code(stranger_release)).status_code == 200
    manifest = ship(run, place.endpoint, moved=lambda *_: pytest.fail("the champion must not move"))
    assert "stale" in manifest.extra["problem"] and place.serving == stranger_release.forward


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_ship_node_ships_nothing_after_the_verdict_was_changed(place: Any) -> None:
    run = approved(place, place.waiting("night-1"))
    changed(run.path(run.need("verify"), "verdict"), ratio=9.0)
    refused_ship(place, run, "verdict of node verify is missing or was changed")


def test_the_ship_node_ships_nothing_after_the_verdict_was_replaced(place: Any) -> None:
    run = approved(place, place.waiting("night-1"))
    verify = run.need("verify")
    other = {**run.read_json(verify, "verdict"), "ratio": 9.0}
    run.finish("verify", verify.inputs, {"verdict": run.write_json("verdict", other)}, {"passed": True})
    refused_ship(place, run, "verdict is not the one")


def test_the_ship_node_ships_nothing_after_the_record_was_changed(place: Any) -> None:
    run = approved(place, place.waiting("night-1"))
    changed(run.path(run.need("release"), "record"), layout="tp8")
    refused_ship(place, run, "record of node release is missing or was changed")


def test_the_ship_node_ships_nothing_under_a_replaced_record(place: Any) -> None:
    """Whoever may write into the run folder can make it consistent, but cannot sign."""
    run = approved(place, place.waiting("night-1"))
    release, manifest = read_release(run), run.need("release")
    record = dataclasses.replace(release, layout="tp8").to_record()
    run.finish("release", manifest.inputs, {**manifest.outputs, "record": run.write_json("release", record)}, {})
    refused_ship(place, run, "does not fit")


FORMS: list[tuple[dict[str, Any], str]] = [
    ({}, "no signature"),
    ({"approve": False, "who": "Ann Other", "why": "unreadable"}, "no signature"),
    ({"approve": False, "code": "x" * 9, "why": "unreadable"}, "no signature"),
    ({"code": "# [look](http://here)." + "A" * 86}, "no signature"),
    ({"approve": True}, "no signature"),
    ({"approve": True, "code": "yes", "who": "Ann Other", "why": "trust me"}, "no signature"),
]


@pytest.mark.parametrize(
    ("form", "reason"), FORMS, ids=["empty", "rejects", "rejects with some text", "markdown", "no code", "some text"]
)
def test_a_resume_without_a_code_leaves_the_run_waiting(place: Any, form: dict[str, Any], reason: str) -> None:
    """What curl, an agent or a candidate could send through Prefect."""
    run = place.waiting("night-1")
    with pytest.raises(Refused, match=reason):
        decide(run, place.endpoint, **form)
    assert run.manifest("approval") is None
    refused_ship(place, run, "nobody has approved")


def test_a_code_of_an_approval_does_not_reject(place: Any) -> None:
    run = place.waiting("night-1")
    with pytest.raises(Refused, match="signs approve, not reject"):
        decide(run, place.endpoint, False, place.code(read_release(run)), "Ann", "why not")
    assert run.manifest("approval") is None


def test_a_code_of_a_rejection_does_not_approve(place: Any) -> None:
    run = place.waiting("night-1")
    with pytest.raises(Refused, match="signs reject, not approve"):
        decide(run, place.endpoint, True, place.code(read_release(run), Decision.REJECT))
    assert run.manifest("approval") is None


def test_an_expired_release_is_not_even_recorded(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.waiting("night-1")
    release = read_release(run)
    monkeypatch.setattr("tideforge.tasks.approve.time.time", lambda: release.expires_at + 1.0)
    with pytest.raises(Refused, match="expired"):
        decide(run, place.endpoint, True, place.code(release))


def test_a_night_killed_before_its_release_is_written_leaves_no_older_one_to_approve(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = approved(place, place.waiting("night-1")), place.night("night-2")
    finish = Run.finish

    def killed(self: Run, node: str, *rest: Any) -> Any:
        if node == "release":
            raise KeyboardInterrupt
        return finish(self, node, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Run, "finish", killed)
        prepare_release(newer, place.endpoint)
    assert newer.manifest("release") is None
    refused_ship(place, older, "superseded: the newer night night-2")
    manifest = prepare_release(newer, place.endpoint)
    assert manifest.extra["waits"] and not (newer.folder / "superseded.json").exists()
