"""The live ship: what is refused changes nothing, and what ships leaves every open answer whole."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tideforge.engine
from tideforge.engine.forward import ENTRY, Forward
from tideforge.engine.release import (
    Decision,
    Gain,
    Release,
    add_approver,
    create_key,
    public_bytes,
    sign,
)

LLAMA = Forward.load(Path(tideforge.engine.__file__).parent / "models" / "llama")
FASTER = LLAMA.with_file(ENTRY, LLAMA.files[ENTRY] + "\n# another source, the same arithmetic\n")
BROKEN = LLAMA.with_file(
    ENTRY, LLAMA.files[ENTRY].replace("def build(", "def build_(") + "\ndef build(ctx):\n    return None\n"
)


class Approver:
    """A served model with a trusted key: makes records as a night would and signs them."""

    def __init__(self, served: Any, state: Path, key: Any) -> None:
        self.served, self.state, self.key = served, state, key
        for forward in (FASTER, BROKEN):
            forward.save(state / "forwards")

    def version(self) -> dict[str, Any]:
        with self.served.client() as client:
            return dict(client.get("/version").json())

    def release(self, forward: str = FASTER.id, **changes: Any) -> Release:
        version = self.version()
        release = Release(
            run="r1",
            endpoint="tiny",
            forward=forward,
            incumbent=version["forward"],
            layout="tp1",
            weights_sha256=version["weights_sha256"],
            launch=version["launch"],
            environment=tuple(sorted(version["environment"].items())),
            verdict_sha256="0" * 64,
            gain=Gain.of(1.2, 1.1, 1.3, 8),
            created_at=int(time.time()),
            expires_at=int(time.time()) + 600,
            previous=version["release"],
            go_back="tideforge rollback",
        )
        return dataclasses.replace(release, **changes)

    def post(
        self, path: str, release: Release, decision: Decision = Decision.APPROVE, **changes: Any
    ) -> httpx.Response:
        code = sign(self.key, release, decision, "ann")
        with self.served.client() as client:
            return client.post(path, json={"record": release.to_record(), "signature": code, **changes})


@pytest.fixture
def approver(serve_at: Any, tmp_path: Path) -> Iterator[Approver]:
    key = create_key(tmp_path / "key.pem", "passphrase of a test")
    add_approver(tmp_path / "state" / "approvers.json", "ann", public_bytes(key))
    with serve_at(tmp_path / "state") as served:
        yield Approver(served, tmp_path / "state", key)


def until(condition: Any, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def question(index: int, tokens: int, stream: bool = False) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"model": "tiny", "prompt": f"prompt {index} of eight", "stream": stream, **sampling}


def slow_down(approver: Approver, forward: str) -> list[tuple[str, ...]]:
    """Makes each step of a forward take at least 20 ms more; gives the request ids of every step from now on."""
    executor = approver.served.live.loop.core._executors[forward]
    steps, execute = [], executor.execute

    def slow(step: Any) -> list[int]:
        steps.append(step.request_ids)
        time.sleep(0.02)
        return list(execute(step))

    executor.execute = slow
    return steps


def complete(approver: Approver, index: int, tokens: int = 100) -> str:
    with approver.served.client() as client:
        answer = client.post("/v1/completions", json=question(index, tokens))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def refused(approver: Approver, answer: httpx.Response, status: int, reason: str) -> None:
    """Refused for that reason in one line, and nothing has changed."""
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and reason in message and "\n" not in message, (answer.status_code, message)
    assert approver.version()["forward"] == LLAMA.id
    assert approver.served.live.loop.core.forwards == (LLAMA.id,)
    assert not list((approver.state / "releases").glob("*"))
    assert complete(approver, 0, 3)


def test_a_ship_with_eight_streams_open_leaves_each_answer_whole(approver: Approver) -> None:
    expected = [complete(approver, index, 60) for index in range(8)]
    slow_down(approver, LLAMA.id)
    begun, texts, failures = threading.Barrier(9), [""] * 8, []

    def stream(index: int) -> None:
        body = question(index, 60, stream=True)
        with approver.served.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            for number, line in enumerate(lines):
                if number == 0:
                    begun.wait(20)
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    failures.append(event)
                else:
                    texts[index] += event["choices"][0]["text"]

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    begun.wait(20)
    answer = approver.post("/admin/ship", approver.release())
    assert answer.status_code == 200, answer.text
    assert (answer.json()["forward"], answer.json()["previous"]) == (FASTER.id, LLAMA.id)
    assert answer.json()["finishing"] == 8
    for thread in threads:
        thread.join(60)
    assert not failures and texts == expected
    assert approver.version()["forward"] == FASTER.id
    until(lambda: approver.served.live.loop.core.forwards == (FASTER.id,))
    assert len(approver.served.workers.ended) == 1
    assert approver.served.blocks_held == 0 and approver.served.live.counters.failed == 0
    assert complete(approver, 3, 60) == expected[3]


def test_old_requests_stay_with_the_forward_that_began_them(approver: Approver) -> None:
    steps = slow_down(approver, LLAMA.id)
    with (
        approver.served.client() as client,
        client.stream("POST", "/v1/completions", json=question(0, 150, True)) as answer,
    ):
        lines = answer.iter_lines()  # kept: the response closes with its iterator
        next(lines)
        assert approver.post("/admin/ship", approver.release()).json()["finishing"] == 1
        assert approver.version()["draining"] == [LLAMA.id]
        before = len(steps)
        assert complete(approver, 1, 5)  # a new one, on the new forward
        until(lambda: len(steps) > before + 3)  # while the old one goes on
        assert len({name for names in steps for name in names}) == 1
    until(lambda: approver.version()["draining"] == [])  # the client left: nothing holds the old forward any more
    assert approver.served.live.loop.core.forwards == (FASTER.id,)


def test_the_release_is_kept_and_a_restart_serves_it(approver: Approver, serve_at: Any) -> None:
    release = approver.release()
    assert approver.post("/admin/ship", release).status_code == 200
    assert approver.version()["release"] == release.nonce
    (kept,) = (approver.state / "releases").iterdir()
    assert kept.name == f"0001-{FASTER.id[:12]}.json" and json.loads(kept.read_text())["who"] == "ann"
    with serve_at(approver.state) as again:
        assert again.live.loop.current == FASTER.id and again.live.shipper.release == release.nonce
    with serve_at(approver.state, launch="another command") as other:
        assert other.live.loop.current == LLAMA.id
        assert "launch differs" in other.live.note


def test_rollback_and_flips(approver: Approver) -> None:
    release = approver.release()
    assert approver.post("/admin/ship", release).status_code == 200
    with approver.served.client() as client:
        back = client.post("/admin/flip", json={"nonce": release.nonce, "to": "incumbent"})
        assert (
            back.status_code == 200
            and approver.version()["forward"] == LLAMA.id
            and approver.version()["release"] == ""
        )
        assert client.post("/admin/flip", json={"nonce": release.nonce, "to": "forward"}).status_code == 200
        assert client.post("/admin/flip", json={"nonce": "another", "to": "forward"}).status_code == 409
    assert approver.version()["forward"] == FASTER.id and approver.version()["release"] == release.nonce
    rollback = approver.release(forward=LLAMA.id)
    assert approver.post("/admin/rollback", rollback).status_code == 403  # signed as an approval
    assert approver.post("/admin/rollback", rollback, Decision.ROLLBACK).status_code == 200
    assert approver.version()["forward"] == LLAMA.id
    assert len(list((approver.state / "releases").iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"incumbent": FASTER.id}, 409, "stale"),
        ({"weights_sha256": "0" * 64}, 409, "weights_sha256"),
        ({"launch": "tideforge serve --other"}, 409, "launch"),
        ({"environment": (("torch", "0"),)}, 409, "environment"),
        ({"expires_at": 1}, 409, "expired"),
        ({"endpoint": "other"}, 409, "endpoint"),
        ({"forward": "0" * 64}, 409, "missing"),
        ({"forward": BROKEN.id}, 409, "does not start here"),
    ],
)
def test_a_release_that_does_not_fit_is_refused(approver: Approver, changes: Any, status: int, reason: str) -> None:
    refused(approver, approver.post("/admin/ship", approver.release(**changes)), status, reason)


def test_without_a_signature_that_holds_nothing_ships(approver: Approver, tmp_path: Path) -> None:
    release = approver.release()
    refused(approver, approver.post("/admin/ship", release, signature=""), 403, "no signature")
    refused(approver, approver.post("/admin/ship", release, Decision.REJECT), 403, "reject")
    changed = dataclasses.replace(release, forward=BROKEN.id).to_record()
    refused(approver, approver.post("/admin/ship", release, record=changed), 403, "does not fit")
    stranger = create_key(tmp_path / "other.pem", "passphrase of a stranger")
    code = sign(stranger, release, Decision.APPROVE, "ann")
    refused(approver, approver.post("/admin/ship", release, signature=code), 403, "not among this server's approvers")
    with approver.served.client() as client:
        assert client.post("/admin/ship", json={"record": release.to_record()}).status_code == 400


def test_changed_files_under_a_signed_id_are_refused(approver: Approver) -> None:
    path = approver.state / "forwards" / FASTER.id / ENTRY
    path.write_text(path.read_text() + "\n# changed after signing\n")
    refused(approver, approver.post("/admin/ship", approver.release()), 409, "do not hash")


def test_a_code_works_once(approver: Approver) -> None:
    release = approver.release()
    assert approver.post("/admin/ship", release).status_code == 200
    back = approver.release(forward=LLAMA.id)
    assert approver.post("/admin/rollback", back, Decision.ROLLBACK).status_code == 200
    again = approver.post("/admin/ship", release)
    assert again.status_code == 409 and "used before" in again.json()["error"]["message"]
    assert approver.version()["forward"] == LLAMA.id


def test_a_refused_start_leaves_the_code_good(approver: Approver, monkeypatch: pytest.MonkeyPatch) -> None:
    from tideforge.errors import CandidateError

    release, start = approver.release(), approver.served.workers.start

    def fails(forward: Forward) -> Any:
        raise CandidateError("out_of_memory", "no room for a second worker")

    monkeypatch.setattr(approver.served.workers, "start", fails)
    refused(approver, approver.post("/admin/ship", release), 409, "no room")
    monkeypatch.setattr(approver.served.workers, "start", start)
    assert approver.post("/admin/ship", release).status_code == 200


def test_a_dead_worker_is_replaced_and_its_requests_go_on(approver: Approver) -> None:
    expected = complete(approver, 1)
    live = approver.served.live
    executor = live.loop.core._executors[LLAMA.id]
    steps, execute = [0], executor.execute

    def dies_once(step: Any) -> list[int]:
        from tideforge.errors import PeerGone

        steps[0] += 1
        if steps[0] == 10:
            raise PeerGone("killed")
        return list(execute(step))

    executor.execute = dies_once  # type: ignore[method-assign]
    assert complete(approver, 1) == expected
    assert steps[0] == 10 and live.counters.failed == 0
    assert live.loop.core._executors[LLAMA.id] is not executor


def test_when_no_worker_can_be_had_requests_fail_loudly_and_are_counted(
    approver: Approver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tideforge.errors import CandidateError, PeerGone

    live = approver.served.live

    def dies(step: Any) -> list[int]:
        raise PeerGone("killed")

    def fails(forward: Forward) -> Any:
        raise CandidateError("crashed", "no worker")

    live.loop.core._executors[LLAMA.id].execute = dies  # type: ignore[method-assign]
    monkeypatch.setattr(approver.served.workers, "start", fails)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5}
    with approver.served.client() as client:
        answer = client.post("/v1/completions", json=body)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_failed"
    assert "engine_failed" in lines[-1]
    assert live.counters.failed == 2 and approver.served.blocks_held == 0
    assert live.loop.alive


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["releases.write_synced", "release.replace_file"])
def test_a_disk_without_room_costs_no_code(approver: Approver, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The file of the release, or the list of used codes: whichever does not fit."""

    def full(*_: Any) -> None:
        raise FULL

    release = approver.release()
    with monkeypatch.context() as patched:
        patched.setattr(f"tideforge.engine.{place}", full)
        refused(approver, approver.post("/admin/ship", release), 409, "the code is still good")
    assert not list((approver.state / "releases").iterdir()), "nothing half-written stays"
    assert approver.post("/admin/ship", release).status_code == 200
    assert approver.version()["forward"] == FASTER.id


def test_a_full_disk_costs_no_code(serve_at: Any, tmp_path: Path) -> None:
    """A real one, of 256 KiB. Only root can mount it."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}; patched writes are tested above")
    try:
        key = create_key(tmp_path / "key.pem", "passphrase of a test")
        add_approver(disk / "approvers.json", "ann", public_bytes(key))
        with serve_at(disk) as served:
            approver = Approver(served, disk, key)
            release, filler = approver.release(), disk / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 512):
                    pass
            refused(approver, approver.post("/admin/ship", release), 409, "free space")
            filler.unlink()
            assert approver.post("/admin/ship", release).status_code == 200
            assert approver.version()["forward"] == FASTER.id
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def test_a_flip_stands_where_the_servers_file_cannot_be_written(
    approver: Approver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: str) -> None:
        raise FULL

    monkeypatch.setattr(approver.served.live.shipper, "_on_flip", full)
    assert approver.post("/admin/ship", approver.release()).json()["forward"] == FASTER.id
    assert approver.version()["forward"] == FASTER.id


def test_the_server_starts_beside_a_release_that_it_cannot_read(approver: Approver, serve_at: Any) -> None:
    release = approver.release()
    assert approver.post("/admin/ship", release).status_code == 200
    bad = approver.state / "releases" / "0002-damaged.json"
    bad.write_text('{"record": {"run"')
    with serve_at(approver.state) as again:
        assert again.live.loop.current == FASTER.id and again.live.shipper.release == release.nonce
        assert str(bad) in again.live.note and "restore it or move it elsewhere" in again.live.note


def test_the_last_flip_closes_the_window(approver: Approver) -> None:
    release = approver.release()
    assert approver.post("/admin/ship", release).status_code == 200

    def flip(to: str, **more: Any) -> httpx.Response:
        with approver.served.client() as client:
            return client.post("/admin/flip", json={"nonce": release.nonce, "to": to, **more})

    assert flip("incumbent").status_code == 200
    assert flip("incumbent", done=True).status_code == 409 and approver.version()["forward"] == LLAMA.id
    assert flip("forward", done=True).status_code == 200 and approver.version()["forward"] == FASTER.id
    for to in ("incumbent", "forward"):
        answer = flip(to)
        assert answer.status_code == 409 and "window for flipping is closed" in answer.json()["error"]["message"]
    assert approver.version()["forward"] == FASTER.id
