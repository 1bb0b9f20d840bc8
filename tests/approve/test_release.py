"""Records, keys and the guard, without HTTP and without a model."""

from __future__ import annotations

import dataclasses
import errno
import json
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tideforge.engine import release as rel
from tideforge.engine.forward import Forward
from tideforge.engine.release import Decision, Gain, Release, ServerState, ShipGuard
from tideforge.engine.releases import next_number, release_files, shipped_release
from tideforge.errors import Refused, UserError

ENVIRONMENT = (("python", "3.11"), ("torch", "2.13.0"))
OLD, NEW = Forward({"forward.py": "a = 1\n"}), Forward({"forward.py": "a = 2\n", "knobs.json": "{}"})


@dataclasses.dataclass
class Server:
    """What the guard is told; a test changes it as it likes."""

    state: ServerState
    trusted: dict[str, tuple[str, bytes]]
    nonces: Path

    def guard(self) -> ShipGuard:
        return ShipGuard(self.trusted, lambda: self.state, self.nonces)


@pytest.fixture
def server(tmp_path: Path, key: tuple[Path, Any]) -> Server:
    for forward in (OLD, NEW):
        forward.save(tmp_path / "forwards")
    state = ServerState(OLD.id, "w" * 64, "serve", ENVIRONMENT, tmp_path / "forwards", tmp_path / "runs", now=1000.0)
    public = rel.public_bytes(key[1])
    return Server(state, {rel.key_id(public): ("Ann", public)}, tmp_path / "nonces.json")


def release(**changes: Any) -> Release:
    fields: dict[str, Any] = {
        "run": "r1", "endpoint": "tiny", "forward": NEW.id, "incumbent": OLD.id, "layout": "unchanged",
        "weights_sha256": "w" * 64, "launch": "serve", "environment": ENVIRONMENT, "verdict_sha256": "v" * 64,
        "gain": Gain.of(1.3, 1.2, 1.4, 8), "created_at": 900, "expires_at": 2000, "previous": "", "go_back": "rollback",
    }  # fmt: skip
    return Release(**{**fields, **changes})


def test_a_record_survives_the_wire_and_signs_the_same_bytes() -> None:
    one = release()
    again = Release.from_record(json.loads(json.dumps(one.to_record())))
    assert again == one
    signed = one.signed_bytes(Decision.APPROVE, "Zoë", "k")
    assert signed == again.signed_bytes(Decision.APPROVE, "Zoë", "k") and signed.isascii()
    spelled = json.loads(signed, parse_float=lambda text: pytest.fail(f"a float is signed: {text}"))
    assert spelled["record"]["gain"]["ratio"] == "1.3000" and spelled["who"] == "Zoë"
    assert list(spelled) == sorted(spelled)
    assert one.nonce != release().nonce


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Release)])
def test_every_field_is_signed(field: str, key: tuple[Path, Any], server: Server) -> None:
    one = release()
    code = rel.sign(key[1], one, Decision.APPROVE, "Ann")
    assert rel.verify(one.to_record(), code, server.trusted).who == "Ann"
    other: dict[str, Any] = {
        "forward": "0" * 64, "incumbent": "0" * 64, "environment": (), "gain": Gain(), "created_at": 1, "expires_at": 9999,
    }  # fmt: skip
    changed = dataclasses.replace(one, **{field: other.get(field, "changed")})
    with pytest.raises(Refused, match="does not fit"):
        rel.verify(changed.to_record(), code, server.trusted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: [record], "not a JSON object"),
        (lambda record: {**record, "more": 1}, "fields differ from a release's: more"),
        (lambda record: {name: record[name] for name in record if name != "nonce"}, "fields differ .*nonce"),
        (lambda record: {**record, "expires_at": 2000.0}, "expires_at is not of type int"),
        (lambda record: {**record, "expires_at": True}, "expires_at is not of type int"),
        (lambda record: {**record, "launch": None}, "launch is not of type str"),
        (lambda record: {**record, "gain": {**record["gain"], "ratio": 1.3}}, "holds numbers"),
        (lambda record: {**record, "gain": {}}, "gain is not"),
        (lambda record: {**record, "environment": [["torch"]]}, "environment is not"),
        (lambda record: {**record, "environment": {"torch": "2"}}, "environment is not"),
        (lambda record: {**record, "forward": "../../etc"}, "forward is not the hash"),
    ],
)
def test_a_record_of_another_shape_is_refused(change: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        Release.from_record(change(release().to_record()))


def test_a_key_file_is_the_approvers_alone(tmp_path: Path, key: tuple[Path, Any]) -> None:
    path, private_key = key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and b"ENCRYPTED" in path.read_bytes()
    before = path.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        rel.create_key(path, "other")
    assert path.read_bytes() == before and [file.name for file in path.parent.iterdir()] == [path.name]
    assert rel.public_bytes(rel.load_key(path, "correct horse")) == rel.public_bytes(private_key)
    with pytest.raises(UserError, match="check the passphrase"):
        rel.load_key(path, "wrong")
    with pytest.raises(UserError, match="cannot be read"):
        rel.load_key(tmp_path / "none.pem", "x")
    with pytest.raises(UserError, match="is empty"):
        rel.create_key(tmp_path / "new.pem", "")
    copy = tmp_path / "copy.pem"
    copy.write_bytes(before)
    copy.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        rel.load_key(copy, "correct horse")


def test_approvers_are_named_once(tmp_path: Path) -> None:
    path = tmp_path / "approvers.json"
    assert rel.read_approvers(path) == {}
    rel.add_approver(path, "Ann", b"a" * 32)
    rel.add_approver(path, "Bob", b"b" * 32)
    rel.add_approver(path, "Ann", b"a" * 32)
    assert rel.read_approvers(path)[rel.key_id(b"a" * 32)] == ("Ann", b"a" * 32) and len(rel.read_approvers(path)) == 2
    with pytest.raises(UserError, match="another key"):
        rel.add_approver(path, "Ann", b"c" * 32)
    with pytest.raises(UserError, match="under another name"):
        rel.add_approver(path, "Eve", b"a" * 32)
    for text in ("{", "[]", '{"Ann": 1}', '{"Ann": "YQ=="}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"approvers\.json"):
            rel.read_approvers(path)


def test_a_code_works_once_also_after_a_restart(key: tuple[Path, Any], server: Server) -> None:
    one = release()
    code, guard = rel.sign(key[1], one, Decision.APPROVE, "Ann"), server.guard()
    assert guard.nonce == "" and guard.check(one.to_record(), code).who == "Ann" and not server.nonces.exists()
    assert guard.accept(one.to_record(), code).release == one
    assert guard.nonce == one.nonce
    for again in (guard, server.guard()):
        with pytest.raises(Refused, match="used before"):
            again.accept(one.to_record(), code)
    server.nonces.write_text("{")
    with pytest.raises(UserError, match="must work only once"):
        server.guard()


def test_what_is_refused_uses_no_code_up(key: tuple[Path, Any], server: Server) -> None:
    one, guard = release(), server.guard()
    code, good = rel.sign(key[1], one, Decision.APPROVE, "Ann"), server.state
    server.state = dataclasses.replace(good, forward="0" * 64)
    with pytest.raises(Refused, match="stale"):
        guard.accept(one.to_record(), code)
    server.state = good
    assert guard.accept(one.to_record(), code).key_id in server.trusted


def test_a_name_that_the_key_does_not_stand_for_does_not_hold(key: tuple[Path, Any], server: Server) -> None:
    one = release()
    with pytest.raises(Refused, match="does not fit"):
        rel.verify(one.to_record(), rel.sign(key[1], one, Decision.APPROVE, "Bob"), server.trusted)


def test_a_server_without_approvers_ships_nothing(key: tuple[Path, Any], server: Server) -> None:
    one = release()
    server.trusted = {}
    with pytest.raises(Refused, match="not among this server's approvers"):
        server.guard().accept(one.to_record(), rel.sign(key[1], one, Decision.APPROVE, "Ann"))


def test_flips_end_with_the_window_and_with_the_next_forward(key: tuple[Path, Any], server: Server) -> None:
    one, guard = release(), server.guard()
    guard.accept(one.to_record(), rel.sign(key[1], one, Decision.APPROVE, "Ann"))
    assert guard.flip(one.nonce, "incumbent") == OLD.id and guard.flip(one.nonce, "forward") == NEW.id
    good = server.state
    server.state = dataclasses.replace(good, now=1000 + rel.FLIP_WINDOW_S + 1)
    with pytest.raises(Refused, match="window for flipping closed"):
        guard.flip(one.nonce, "incumbent")
    server.state = dataclasses.replace(good, forward="0" * 64)
    with pytest.raises(Refused, match="another forward serves"):
        guard.flip(one.nonce, "incumbent")
    server.state = good
    (good.forwards / OLD.id / "forward.py").write_text("import os\n")
    with pytest.raises(Refused, match="do not hash"):
        guard.flip(one.nonce, "incumbent")


def test_a_restart_serves_what_was_signed_last(tmp_path: Path, key: tuple[Path, Any], server: Server) -> None:
    assert shipped_release(tmp_path / "none", server.trusted) is None
    folder, one, two = tmp_path / "releases", release(), release(forward=OLD.id, incumbent=NEW.id)
    folder.mkdir()
    for number, (what, decision) in {2: (one, Decision.APPROVE), 10: (two, Decision.ROLLBACK)}.items():
        entry = {"record": what.to_record(), "code": rel.sign(key[1], what, decision, "Ann")}
        (folder / f"{number}-x.json").write_text(json.dumps(entry))
    assert shipped_release(folder, server.trusted) == two
    (folder / "11-x.json").write_text(json.dumps({"record": release(run="forged").to_record(), "code": entry["code"]}))
    assert shipped_release(folder, server.trusted) == two


def test_what_cannot_be_read_is_named_and_passed_over(tmp_path: Path, key: tuple[Path, Any], server: Server) -> None:
    folder, one = tmp_path / "releases", release()
    folder.mkdir()
    entry = {"record": one.to_record(), "code": rel.sign(key[1], one, Decision.APPROVE, "Ann")}
    (folder / "0002-x.json").write_text(json.dumps(entry))
    (folder / "0004-x.json").mkdir()
    for name, raw in {
        "0003-x.json": b"{", "0005-x.json": b"\xff\xfe\x00", "0006-x.json": b"[]", "0007-x.json": b'{"record": {}}',
        "notes-x.json": json.dumps(entry).encode(), "0001-x.json": b"",
    }.items():  # fmt: skip
        (folder / name).write_bytes(raw)
    said: list[str] = []
    assert shipped_release(folder, server.trusted, said.append) == one
    assert [number for number, _ in release_files(folder, said.append)] == [2]
    bad = {path.name for path in folder.iterdir()} - {"0002-x.json"}
    assert {line.split(": ")[0] for line in said} == {str(folder / name) for name in bad}
    assert all("\n" not in line and "restore it or move it elsewhere" in line for line in said)
    assert next_number(folder) == 8, "what cannot be read is not replaced either"


def test_the_window_for_flips_closes_for_good(key: tuple[Path, Any], server: Server) -> None:
    one, guard = release(), server.guard()
    guard.accept(one.to_record(), rel.sign(key[1], one, Decision.APPROVE, "Ann"))
    with pytest.raises(Refused, match="the last flip goes to 'forward'"):
        guard.flip(one.nonce, "incumbent", done=True)
    assert guard.flip(one.nonce, "forward", done=True) == NEW.id
    guard.close()
    for again in (guard, server.guard()):
        with pytest.raises(Refused, match="window for flipping is closed"):
            again.flip(one.nonce, "incumbent")


def test_a_rollback_opens_no_window(key: tuple[Path, Any], server: Server) -> None:
    one, guard = release(), server.guard()
    guard.accept(one.to_record(), rel.sign(key[1], one, Decision.ROLLBACK, "Ann"), Decision.ROLLBACK)
    with pytest.raises(Refused, match="window for flipping is closed"):
        guard.flip(one.nonce, "incumbent")


def test_a_disk_that_takes_no_nonce_uses_no_code_up(
    key: tuple[Path, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, guard = release(), server.guard()
    code = rel.sign(key[1], one, Decision.APPROVE, "Ann")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(rel, "replace_file", full)
        guard.accept(one.to_record(), code)
    assert guard.nonce == "" and server.guard().accept(one.to_record(), code).release == one


def test_times_are_the_clocks() -> None:
    assert ServerState("f", "w", "l", (), Path("x")).now == pytest.approx(time.time(), abs=60)


def test_the_guard_needs_no_torch_and_no_web_framework() -> None:
    code = "import sys, tideforge.engine.release; print(*{'torch', 'fastapi', 'pydantic', 'httpx'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == []
