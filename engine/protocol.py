"""Framing on Unix sockets: a JSON header, raw arrays, file descriptors. Versioned; never pickle.

A frame is 8 bytes little-endian: header length (4) and payload length (4), then the header, then the arrays' bytes.
The header's "arrays" lists name, dtype and shape in payload order. Descriptors ride on the first byte (SCM_RIGHTS).
"""

from __future__ import annotations

import array
import dataclasses
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tideforge.errors import PeerGone, PeerTimeout, ProtocolError, UserError

VERSION = 2
MAX_HEADER = 16 << 20
MAX_PAYLOAD = 1 << 30
MAX_FDS = 16
_PREFIX = struct.Struct("<II")


@dataclasses.dataclass(frozen=True)
class Message:
    """A received frame. `arrays` are read-only views of the received bytes; the receiver owns `fds`."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]
    fds: tuple[int, ...] = ()

    @property
    def type(self) -> str:
        return str(self.header.get("type", ""))


def send(
    sock: socket.socket,
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray] | None = None,
    fds: Sequence[int] = (),
    timeout_s: float | None = None,
) -> None:
    """Sends one frame. Raises PeerGone when the other end is closed, PeerTimeout when it does not read in time."""
    parts = {name: np.ascontiguousarray(value) for name, value in (arrays or {}).items()}
    listing = [[name, value.dtype.str, list(value.shape)] for name, value in parts.items()]
    head = json.dumps({**header, "v": VERSION, "arrays": listing}).encode()
    payload = b"".join(value.tobytes() for value in parts.values())
    frame = _PREFIX.pack(len(head), len(payload)) + head + payload
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.settimeout(timeout_s)
    try:
        sent = sock.sendmsg([frame], ancillary)
        sock.sendall(memoryview(frame)[sent:])
    except TimeoutError as error:
        raise PeerTimeout(f"peer does not read {header.get('type')!r}") from error
    except (BrokenPipeError, ConnectionError) as error:
        raise PeerGone(f"peer closed while being sent {header.get('type')!r}") from error
    finally:
        sock.settimeout(None)


def recv(sock: socket.socket, timeout_s: float | None = None, max_bytes: int = MAX_PAYLOAD) -> Message:
    """Receives one frame with at most `max_bytes` of arrays.

    Raises PeerGone at the peer's end, PeerTimeout at the deadline, ProtocolError on nonsense.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    prefix, fds = _read(sock, _PREFIX.size, deadline, with_fds=True)
    head_bytes, payload_bytes = _PREFIX.unpack(prefix)
    if head_bytes > min(MAX_HEADER, max_bytes) or payload_bytes > max_bytes:
        raise ProtocolError(f"frame of {head_bytes} + {payload_bytes} bytes is over the limit")
    head, _ = _read(sock, head_bytes, deadline)
    payload, _ = _read(sock, payload_bytes, deadline)
    try:
        header = json.loads(head)
        version, listing = header.pop("v"), header.pop("arrays")
        arrays = _unpack(listing, payload)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error
    if version != VERSION:
        raise ProtocolError(f"peer speaks version {version}, this end {VERSION}: restart both from one install")
    return Message(header, arrays, fds)


def call(
    sock: socket.socket, header: Mapping[str, Any], timeout_s: float | None = None, **arrays: np.ndarray
) -> Message:
    """One request, one answer. An answer of type "error" is raised as ProtocolError, one of "user_error" as UserError."""
    send(sock, header, arrays)
    answer = recv(sock, timeout_s)
    if answer.type == "user_error":
        raise UserError(*map(str, answer.header["parts"]))
    if answer.type == "error":
        raise ProtocolError(str(answer.header.get("message", "unnamed error")))
    return answer


def _unpack(listing: list[Any], payload: bytes) -> dict[str, np.ndarray]:
    arrays, offset = {}, 0
    for name, dtype, shape in listing:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(payload, np.dtype(dtype), count, offset).reshape(shape)
        offset += arrays[name].nbytes
    if offset != len(payload):
        raise ValueError("payload does not match the listed arrays")
    return arrays


def _read(
    sock: socket.socket, size: int, deadline: float | None, with_fds: bool = False
) -> tuple[bytes, tuple[int, ...]]:
    buffer, fds = bytearray(), array.array("i")
    while len(buffer) < size:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise PeerTimeout("peer did not answer in time")
        sock.settimeout(left)
        try:
            if with_fds:
                data, ancillary, _, _ = sock.recvmsg(size - len(buffer), socket.CMSG_SPACE(MAX_FDS * fds.itemsize))
                for level, kind, body in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
            else:
                data = sock.recv(min(size - len(buffer), 1 << 20))
        except TimeoutError:
            raise PeerTimeout("peer did not answer in time") from None
        except ConnectionError as error:
            raise PeerGone(str(error)) from error
        finally:
            sock.settimeout(None)
        if not data:
            raise PeerGone("peer closed the connection")
        buffer += data
    return bytes(buffer), tuple(fds)
