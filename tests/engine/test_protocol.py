from __future__ import annotations

import os
import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tideforge.engine import protocol
from tideforge.errors import PeerGone, PeerTimeout, ProtocolError


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with a, b:
        yield a, b


def test_header_arrays_and_descriptors_arrive_as_sent(pair, tmp_path):
    a, b = pair
    path = tmp_path / "file"
    path.write_text("through a descriptor")
    arrays = {"x": np.arange(6, dtype=np.int32).reshape(2, 3), "empty": np.zeros((0, 4), np.float32)}
    with path.open() as file:
        protocol.send(a, {"type": "t", "n": 3}, arrays, fds=[file.fileno()])
    message = protocol.recv(b, 5)
    assert message.type == "t" and message.header["n"] == 3
    for name, value in arrays.items():
        assert message.arrays[name].dtype == value.dtype and np.array_equal(message.arrays[name], value)
    with os.fdopen(message.fds[0]) as file:
        assert file.read() == "through a descriptor"


def test_a_large_frame_passes_in_pieces(pair):
    a, b = pair
    big = np.arange(1 << 20, dtype=np.int64)
    thread = threading.Thread(target=protocol.send, args=(a, {"type": "big"}, {"big": big}))
    thread.start()
    assert np.array_equal(protocol.recv(b, 10).arrays["big"], big)
    thread.join()


def test_a_closed_peer_and_a_silent_peer_are_told_apart(pair):
    a, b = pair
    with pytest.raises(PeerTimeout):
        protocol.recv(b, 0.05)
    a.close()
    with pytest.raises(PeerGone):
        protocol.recv(b, 5)


@given(st.binary(max_size=64))
def test_nonsense_is_a_protocol_error_never_another(raw: bytes):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with a, b:
        a.sendall(struct.pack("<II", len(raw), 0) + raw)
        a.close()
        with pytest.raises(ProtocolError):
            protocol.recv(b, 5)


def test_another_version_is_refused(pair, monkeypatch):
    a, b = pair
    monkeypatch.setattr(protocol, "VERSION", 99)
    protocol.send(a, {"type": "t"})
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match="version 99"):
        protocol.recv(b, 5)
