"""Releases: what an approver signs, and the guard through which the server accepts, returns and flips.

The one-time code is `<key id>.<base64url of the Ed25519 signature>` over the canonical bytes of the record, the
decision, the signer's name and the key id. The server needs nothing else to know who approved what.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from tideforge.engine.forward import Forward
from tideforge.engine.keys import (
    Trusted,
    add_approver,
    create_key,
    crypto,
    key_id,
    key_path,
    load_key,
    public_bytes,
    read_approvers,
    replace_file,
)
from tideforge.errors import CandidateError, Refused, UserError

__all__ = [
    "Approved",
    "Decision",
    "Gain",
    "Release",
    "ServerState",
    "ShipGuard",
    "add_approver",
    "check_against_server",
    "create_key",
    "key_id",
    "key_path",
    "load_forward",
    "load_key",
    "public_bytes",
    "read_approvers",
    "sign",
    "verify",
]

FORMAT = "tideforge release 1"
FLIP_WINDOW_S = 1800.0  # how long after a ship the approved pair may be flipped for measuring
HEX = frozenset("0123456789abcdef")


class Decision(StrEnum):
    APPROVE = "approve"
    REJECT = "reject"
    ROLLBACK = "rollback"


@dataclasses.dataclass(frozen=True)
class Gain:
    """Ratio to the incumbent as text of four decimals, so that signed bytes hold no floats. Pairs 0: not measured."""

    ratio: str = ""
    ci_low: str = ""
    ci_high: str = ""
    pairs: int = 0

    @classmethod
    def of(cls, ratio: float, ci_low: float, ci_high: float, pairs: int) -> Gain:
        return cls(f"{ratio:.4f}", f"{ci_low:.4f}", f"{ci_high:.4f}", pairs)


@dataclasses.dataclass(frozen=True)
class Release:
    """What an approval covers. Times are whole seconds since the epoch; hashes are SHA-256 in hex."""

    run: str
    endpoint: str
    forward: str
    incumbent: str  # what served when this was measured; refused when something else serves by then
    layout: str
    weights_sha256: str
    launch: str
    environment: tuple[tuple[str, str], ...]
    verdict_sha256: str
    gain: Gain
    created_at: int
    expires_at: int
    previous: str  # nonce of the release that serves now, empty for the endpoint's first forward
    go_back: str  # how a person returns to the incumbent
    nonce: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        for name in ("forward", "incumbent"):
            if len(getattr(self, name)) != 64 or not set(getattr(self, name)) <= HEX:
                raise Refused(f"the record's {name} is not the hash of a forward")

    def to_record(self) -> dict[str, Any]:
        """JSON object: what travels and what `from_record` reads back unchanged."""
        record: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return record

    @classmethod
    def from_record(cls, record: Any) -> Release:
        """Strict: the same fields with the same types, nothing more and nothing less. Raises Refused."""
        if not isinstance(record, Mapping):
            raise Refused("the record is not a JSON object")
        fields = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        if set(record) != set(fields):
            wrong = ", ".join(sorted(str(name) for name in set(record) ^ set(fields)))
            raise Refused(f"the record's fields differ from a release's: {wrong}")
        for name, kind in fields.items():
            if kind in ("str", "int") and type(record[name]).__name__ != kind:
                raise Refused(f"the record's field {name} is not of type {kind}")
        return cls(**{**record, "environment": _pairs(record["environment"]), "gain": _gain(record["gain"])})

    def signed_bytes(self, decision: Decision, who: str, key_id: str) -> bytes:
        """The one spelling that is signed: sorted keys, no spaces, ASCII, no floats."""
        value = {
            "format": FORMAT, "record": self.to_record(), "decision": str(decision), "who": who, "key_id": key_id,
        }  # fmt: skip
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _pairs(raw: Any) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(pair) for pair in raw if isinstance(pair, list | tuple)] if isinstance(raw, list | tuple) else []
    if [*map(list, pairs)] != raw or not all(len(pair) == 2 and all(type(x) is str for x in pair) for pair in pairs):
        raise Refused("the record's environment is not a list of [name, value]")
    return tuple((name, value) for name, value in pairs)


def _gain(raw: Any) -> Gain:
    names = ("ratio", "ci_low", "ci_high")
    if not isinstance(raw, Mapping) or set(raw) != {*names, "pairs"} or type(raw["pairs"]) is not int:
        raise Refused("the record's gain is not {ratio, ci_low, ci_high, pairs}")
    if not all(isinstance(raw[name], str) for name in names):
        raise Refused("the record's gain holds numbers where text is signed")
    return Gain(**raw)


# --- signing and verifying --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Approved:
    """A signature that holds: who decided what about which release. Says nothing yet about the server's state."""

    who: str
    key_id: str
    decision: Decision
    release: Release


def sign(private_key: Any, release: Release, decision: Decision, who: str) -> str:
    """The one-time code. `who` must be the name under which the server trusts this key."""
    name = key_id(public_bytes(private_key))
    signature: bytes = private_key.sign(release.signed_bytes(decision, who, name))
    return f"{name}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def verify(record: Any, code: Any, trusted: Trusted) -> Approved:
    """Raises Refused with a reason of one line."""
    release = Release.from_record(record)
    if not isinstance(code, str) or not code.strip():
        raise Refused("no signature: a release ships only with an approver's one-time code")
    name, signature = _parse(code.strip())
    if name not in trusted:
        raise Refused(f"the code was made with key {name}, which is not among this server's approvers")
    who, public = trusted[name]
    for decision in Decision:
        if _holds(public, signature, release.signed_bytes(decision, who, name)):
            return Approved(who, name, decision, release)
    raise Refused("the signature does not fit: it is another run's, or the record was changed after signing")


def _parse(code: str) -> tuple[str, bytes]:
    name, _, text = code.partition(".")
    try:
        signature = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        signature = b""
    if len(signature) != 64 or len(name) > 64 or not set(name) <= HEX:  # the name is told to whoever reads the refusal
        raise Refused("no signature: the code is not one that `tideforge code` prints")
    return name, signature


def _holds(public: bytes, signature: bytes, message: bytes) -> bool:
    ed25519, _, invalid = crypto()
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except invalid:
        return False
    return True


# --- what the server asks ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ServerState:
    """What the server knows of itself at the moment of a decision."""

    forward: str  # id of what serves
    weights_sha256: str
    launch: str
    environment: tuple[tuple[str, str], ...]
    forwards: Path  # folder of staged forwards, one folder an id
    runs: Path | None = None  # the endpoint's run folders, for marks of superseded runs
    used_nonces: frozenset[str] = frozenset()
    now: float = dataclasses.field(default_factory=time.time)


def load_forward(forwards: Path, forward_id: str) -> Forward:
    """The staged files, if they hash to the id. Raises Refused. Serve these bytes, not what is read later."""
    try:
        forward = Forward.load(forwards / forward_id)
    except (OSError, UnicodeDecodeError, CandidateError):
        raise Refused(f"the files of forward {forward_id[:12]} are missing or cannot be read") from None
    if forward.id != forward_id:
        raise Refused(f"the files of forward {forward_id[:12]} do not hash to its id: a file or knob was changed")
    return forward


def check_against_server(release: Release, state: ServerState, decision: Decision = Decision.APPROVE) -> None:
    """Raises Refused when this release must not go to this server now. Changes nothing."""
    if decision is Decision.REJECT:
        raise Refused("the run was rejected: its code rejects, it does not approve")
    if release.nonce in state.used_nonces:
        raise Refused("this release was used before: a code works once")
    if state.now > release.expires_at:
        raise Refused(f"the approval expired {state.now - release.expires_at:.0f} s ago")
    if release.incumbent != state.forward:
        now, then = state.forward[:12], release.incumbent[:12]
        raise Refused(f"stale: {now} serves now, but the release was measured against {then}")
    for name in ("weights_sha256", "launch"):
        if getattr(release, name) != getattr(state, name):
            raise Refused(f"the server's {name} differs from the approved one")
    if sorted(release.environment) != sorted(state.environment):
        changed = ", ".join(sorted({name for name, _ in {*release.environment} ^ {*state.environment}}))
        raise Refused(f"the server's environment differs from the approved one in {changed}")
    superseded = state.runs is not None and (state.runs / release.run / "superseded.json").exists()
    if superseded and decision is Decision.APPROVE:
        raise Refused("superseded: a newer night of this endpoint stands")
    load_forward(state.forwards, release.forward)


class ShipGuard:
    """All decisions of the server about what it serves, without HTTP. One object a server; threads may share it.

    `state_fn` says what serves at that moment. Nonces are kept in `used_nonces_path` before a decision is returned, so
    a crash costs an approval and never lets one through twice.
    """

    def __init__(self, trusted: Trusted, state_fn: Callable[[], ServerState], used_nonces_path: Path) -> None:
        self._trusted, self._state_fn, self._path = dict(trusted), state_fn, used_nonces_path
        self._lock = threading.Lock()
        self._kept = self._read()

    def check(self, record: Any, code: Any, decision: Decision = Decision.APPROVE) -> Approved:
        """All that `accept` asks, without using the code up: before the server starts a worker for it."""
        return self._checked(record, code, decision)[0]

    def accept(self, record: Any, code: Any, decision: Decision = Decision.APPROVE) -> Approved:
        """Burns the nonce and returns who approved which release; or raises Refused or OSError and nothing has changed."""
        with self._lock:
            approved, state = self._checked(record, code, decision)
            pair = {name: getattr(approved.release, name) for name in ("nonce", "forward", "incumbent")}
            closed = decision is Decision.ROLLBACK  # nothing is measured then
            shipped = {**pair, "at": state.now, "closed": closed}
            self._keep(used=[*self._kept["used"], pair["nonce"]], shipped=shipped)
        return approved

    def _checked(self, record: Any, code: Any, decision: Decision) -> tuple[Approved, ServerState]:
        approved = verify(record, code, self._trusted)
        if approved.decision is not decision:
            raise Refused(f"the code signs {approved.decision}, not {decision}")
        state = dataclasses.replace(self._state_fn(), used_nonces=frozenset(self._kept["used"]))
        check_against_server(approved.release, state, decision)
        return approved, state

    def flip(self, nonce: str, to: str, done: bool = False) -> str:
        """Id of the forward to serve for measuring: one of the two that the release just accepted names.

        `done`: the caller will `close` the window after this flip, which then must be to the release's own forward.
        """
        with self._lock:
            shipped, state = self._kept["shipped"], self._state_fn()
        if to not in ("forward", "incumbent"):
            raise Refused("a flip goes to 'forward' or to 'incumbent'")
        if shipped is None or nonce != shipped["nonce"]:
            raise Refused("only the release shipped last may be flipped")
        if shipped.get("closed"):
            raise Refused("the window for flipping is closed: nothing is left to measure")
        if done and to != "forward":
            raise Refused("the last flip goes to 'forward', which an approver has signed to serve")
        if state.now > shipped["at"] + FLIP_WINDOW_S:
            raise Refused(f"the window for flipping closed {FLIP_WINDOW_S / 60:.0f} minutes after the ship")
        if state.forward not in (shipped["forward"], shipped["incumbent"]):
            raise Refused("another forward serves than the two of the release")
        load_forward(state.forwards, shipped[to])
        return str(shipped[to])

    def close(self) -> None:
        """No further flips of this release. Closed for this process even where the disk does not take it."""
        with self._lock:
            self._kept = {**self._kept, "shipped": {**self._kept["shipped"], "closed": True}}
            self._keep(**self._kept)

    @property
    def nonce(self) -> str:
        """Nonce of the release accepted last, for GET /version; empty before the first."""
        shipped = self._kept["shipped"]
        return str(shipped["nonce"]) if shipped else ""

    def _read(self) -> dict[str, Any]:
        try:
            raw = json.loads(self._path.read_text())
            return {"used": list(raw["used"]), "shipped": raw["shipped"]}
        except FileNotFoundError:
            return {"used": [], "shipped": None}
        except (ValueError, KeyError, TypeError):
            raise UserError(str(self._path), "cannot be read", "restore it: a code must work only once") from None

    def _keep(self, **kept: Any) -> None:
        replace_file(self._path, json.dumps(kept, indent=1).encode())
        self._kept = kept
