"""The commands a person uses, against the real server and a loopback Prefect that keeps what it is sent."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tideforge.engine import release as rel
from tideforge.engine.release import Decision
from tideforge.errors import Refused, UserError
from tideforge.flows.cli import cli
from tideforge.flows.commands import release as commands
from tideforge.tasks.approve import read_release


@pytest.fixture(autouse=True)
def own_key(key: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEFORGE_APPROVER_KEY", str(key[0]))
    monkeypatch.setenv("TIDEFORGE_PASSPHRASE", "correct horse")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def call(*words: object) -> Result:
    """Errors that a user can mend are raised, as `main` gets them."""
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


def test_code_prints_the_signature_alone(place: Any) -> None:
    run = place.waiting("night-1")
    result = call("code", "latest", "--state", place.state)
    release, trusted = read_release(run), rel.read_approvers(place.state / "approvers.json")
    approved = rel.verify(release.to_record(), result.stdout.strip(), trusted)
    assert (approved.decision, approved.who) == (Decision.APPROVE, "Ann Other")
    assert release.forward[:16] in result.stderr
    rejecting = call("code", run.folder, "--reject").stdout.strip()
    assert rel.verify(release.to_record(), rejecting, trusted).decision is Decision.REJECT


def test_nothing_is_signed_for_a_run_that_does_not_hold_together(place: Any) -> None:
    run = place.waiting("night-1")
    path = place.state / "forwards" / read_release(run).forward / "forward.py"
    path.write_text(path.read_text() + "# more\n")
    with pytest.raises(Refused, match="do not hash"):
        call("code", run.folder)


def test_approve_records_where_no_flow_is_suspended(place: Any) -> None:
    run = place.waiting("night-1")
    assert (
        "approved run night-1 as Ann Other" in call("approve", "night-1", "--state", place.state, "--why", "ok").output
    )
    facts = run.need("approval").extra
    assert (facts["decision"], facts["who"], facts["why"], facts["signed"]) == ("approve", "Ann Other", "ok", True)
    with pytest.raises(Refused, match="decided already: approve by Ann Other"):
        call("reject", run.folder, "--why", "changed my mind")


def test_reject_is_signed_too(place: Any) -> None:
    run = place.waiting("night-1")
    call("reject", run.folder, "--why", "too clever")
    facts = run.need("approval").extra
    assert (facts["decision"], facts["why"], facts["signed"]) == ("reject", "too clever", True)


def test_wrong_keys_names_and_runs_are_named(place: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run under .* has a release"):
        call("code", "latest", "--state", place.state)
    run = place.waiting("night-1")
    with pytest.raises(UserError, match="your key stands for Ann Other"):
        call("approve", run.folder, "--who", "Bob")
    monkeypatch.setenv("TIDEFORGE_APPROVER_KEY", str(tmp_path / "other.pem"))
    rel.create_key(tmp_path / "other.pem", "correct horse")
    with pytest.raises(UserError, match="is not trusted in"):
        call("approve", run.folder)
    monkeypatch.delenv("TIDEFORGE_PASSPHRASE")
    with pytest.raises(UserError, match="set TIDEFORGE_PASSPHRASE"):
        call("approve", run.folder)
    assert run.manifest("approval") is None


def test_approver_makes_a_key_and_lists_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEFORGE_APPROVER_KEY", str(tmp_path / "config" / "key.pem"))
    state = tmp_path / "state"
    with pytest.raises(UserError, match="--name"):
        call("approver", "--create-key", "--state", state)
    assert call("approver", "--create-key", "--name", "Bob", "--state", state).stdout.split()[1] == "Bob"
    call("approver", "--add", "--name", "Bob", "--state", tmp_path / "second")
    assert (state / "approvers.json").read_text() == (tmp_path / "second" / "approvers.json").read_text()
    assert b"PRIVATE" not in (state / "approvers.json").read_bytes()


def test_releases_and_rollback(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Any] = []

    def moved(_: Any, how: str, forward: str) -> bool:
        moves.append((how, forward))
        return True

    monkeypatch.setattr("tideforge.tasks.track.moved", moved)
    assert "no release yet" in call("releases", "--state", place.state).output
    first, release = place.serving, read_release(place.waiting("night-1"))
    place.live.shipper.ship(release.to_record(), place.code(release))
    (entry,) = json.loads(call("releases", "--state", place.state, "--json").stdout)
    assert entry["serves"] is True and entry["record"]["forward"] == release.forward
    assert first[:12] in call("rollback", "--state", place.state, "--why", "slow").output
    assert place.serving == first and moves == [("rollback", first)]
    listed = json.loads(call("releases", "--state", place.state, "--json").stdout)
    assert [(one["decision"], one.get("why", "")) for one in listed] == [
        ("approve", ""),
        ("rollback", "slow"),
    ]
    call("rollback", "--state", place.state, "--to", 1)
    assert place.serving == release.forward
    with pytest.raises(UserError, match="serves already"):
        call("rollback", "--state", place.state, "--to", 1)
    with pytest.raises(UserError, match="no such release"):
        call("rollback", "--state", place.state, "--to", 9)


class Prefect(http.server.BaseHTTPRequestHandler):
    """The two routes that a resume needs, with Prefect's shapes."""

    state, answer = "PAUSED", {"status": "ACCEPT"}
    posted: list[Any] = []  # noqa: RUF012 - the handler is made anew for each request

    def do_GET(self) -> None:
        self._send({"state": {"type": self.state}})

    def do_POST(self) -> None:
        self.posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self._send(self.answer)

    def _send(self, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def prefect(**fields: Any) -> Iterator[tuple[str, list[Any]]]:
    posted: list[Any] = []
    handler = type("Handler", (Prefect,), {"posted": posted, **fields})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/api", posted
        finally:
            server.shutdown()
            thread.join(10)


def suspended(place: Any, api: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    run = place.waiting("night-1")
    started = run.need("run")
    run.finish("run", started.inputs, started.outputs, {**started.extra, "flow_run": "flow-1"})
    monkeypatch.setenv("PREFECT_API_URL", api)
    return run


def test_approve_resumes_the_suspended_flow_with_the_form(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with prefect() as (api, posted):
        run = suspended(place, api, monkeypatch)
        assert "the flow goes on" in call("approve", run.folder, "--why", "ok").output
    ((path, body),) = posted
    form = body["run_input"]
    assert path == "/api/flow_runs/flow-1/resume" and set(form) == {"approve", "code", "who", "why"}
    trusted = rel.read_approvers(place.state / "approvers.json")
    assert form["approve"] and rel.verify(read_release(run).to_record(), form["code"], trusted).who == form["who"]
    assert run.manifest("approval") is None  # the flow writes it, after it has checked the code


def test_a_form_that_prefect_refuses_is_an_error(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"status": "REJECT", "details": {"reason": "Reason: 'code' is required"}}
    with prefect(answer=answer) as (api, _):
        run = suspended(place, api, monkeypatch)
        with pytest.raises(UserError, match=r"not resumed .*'code' is required"):
            call("approve", run.folder)


def test_a_flow_that_waits_in_its_own_process_reads_the_run_folder(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with prefect(state="RUNNING") as (api, posted):
        run = suspended(place, api, monkeypatch)
        call("approve", run.folder)
    assert posted == [] and run.need("approval").extra["decision"] == "approve"


def test_a_prefect_that_does_not_answer_is_named() -> None:
    with pytest.raises(UserError, match="does not answer"):
        commands.resume_by_api("http://127.0.0.1:9/api", "flow-1", {})
