"""Approvers' keys: Ed25519, private ones encrypted in a file of the approver's own, public ones in approvers.json."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.errors import MissingExtra, UserError

Trusted = Mapping[str, tuple[str, bytes]]  # key id -> (approver's name, raw public key of 32 bytes)
CREATE = "run `tideforge approver --create-key --name YOU`"


def crypto() -> tuple[Any, Any, Any]:
    """(ed25519, serialization, InvalidSignature); the only place that imports cryptography."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra("cryptography", "serve") from None
    return ed25519, serialization, InvalidSignature


def key_path() -> Path:
    """Where the approver's private key lies: TIDEFORGE_APPROVER_KEY, else ~/.config/tideforge/approver.pem."""
    given = os.environ.get("TIDEFORGE_APPROVER_KEY")
    return Path(given) if given else Path.home() / ".config" / "tideforge" / "approver.pem"


def public_bytes(private_key: Any) -> bytes:
    _, serialization, _ = crypto()
    raw: bytes = private_key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return raw


def key_id(public: bytes) -> str:
    """Short name of a public key."""
    return hashlib.sha256(public).hexdigest()[:12]


def create_key(path: Path, passphrase: str) -> Any:
    """Writes a new private key (PKCS8, encrypted, mode 0600) and returns it. Never replaces a file."""
    if not passphrase:
        raise UserError("passphrase", "is empty", "give one, or set TIDEFORGE_PASSPHRASE")
    ed25519, serialization, _ = crypto()
    private_key = ed25519.Ed25519PrivateKey.generate()
    pem = private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase.encode()),
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_synced(temporary, pem)
        os.link(temporary, path)  # fails where a file is, unlike rename
    except FileExistsError:
        raise UserError(str(path), "exists already", "use it, or name another in TIDEFORGE_APPROVER_KEY") from None
    finally:
        temporary.unlink(missing_ok=True)
    return private_key


def load_key(path: Path, passphrase: str) -> Any:
    """The private key. UserError when it is missing, open to others, damaged, or the passphrase is wrong."""
    ed25519, serialization, _ = crypto()
    try:
        mode, pem = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", CREATE) from None
    if mode & 0o077:
        raise UserError(str(path), "may be read by others", f"chmod 600 {path}")
    try:
        private_key = serialization.load_pem_private_key(pem, passphrase.encode() or None)
    except (ValueError, TypeError):
        raise UserError(str(path), "does not open", "check the passphrase") from None
    if not isinstance(private_key, ed25519.Ed25519PrivateKey):
        raise UserError(str(path), "is not an Ed25519 key", CREATE)
    return private_key


def read_approvers(path: Path) -> dict[str, tuple[str, bytes]]:
    """approvers.json is {name: base64url public key}. Empty when there is no file: then nothing can ship.

    The server calls this once, at its start: adding a name later needs a restart by whoever may restart it.
    """
    try:
        raw = json.loads(path.read_text())
        named = {str(name): base64.urlsafe_b64decode(text) for name, text in raw.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError, OSError):
        raise UserError(str(path), "is not {name: public key}", "mend it, or add the approvers again") from None
    if any(len(public) != 32 for public in named.values()):
        raise UserError(str(path), "holds a key that is not 32 bytes long", "add that approver again")
    return {key_id(public): (name, public) for name, public in named.items()}


def add_approver(path: Path, name: str, public: bytes) -> None:
    """Adds a public key under a name. A name that stands for another key is refused."""
    known = {who: key for who, key in read_approvers(path).values()}
    if known.get(name, public) != public:
        raise UserError(name, f"has another key in {path}", "choose another name, or remove the old entry by hand")
    if any(key == public and who != name for who, key in known.items()):
        raise UserError(name, f"uses a key that stands in {path} under another name", "use that name")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {who: base64.urlsafe_b64encode(key).decode() for who, key in sorted({**known, name: public}.items())}
    replace_file(path, (json.dumps(text, indent=1) + "\n").encode())


def write_synced(path: Path, raw: bytes) -> None:
    """A new file of mode 0600, on the disk when this returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, raw: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_synced(temporary, raw)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
