"""Prefect's sqlite is locked for moments: an approval in such a moment is asked again, not lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tideforge.errors import UserError
from tideforge.flows import follow
from tideforge.flows.commands.release import resume_by_api


@pytest.fixture
def busy() -> Iterator[tuple[str, list[str]]]:
    """A server that answers 503 to every second request; its address and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.command)
            self.rfile.read(int(self.headers.get("content-length") or 0))
            good = len(asked) % 2 == 0
            body: dict[str, Any] = {"state": {"type": "PAUSED"}, "status": "ACCEPT"} if good else {}
            raw = json.dumps(body or {"exception_message": "Service Unavailable"}).encode()
            self.send_response(200 if good else 503)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_an_approval_is_asked_again_while_prefect_is_busy(busy: tuple[str, list[str]]) -> None:
    api, asked = busy
    assert resume_by_api(api, "f", {"approve": True})
    assert asked == ["GET", "GET", "POST", "POST"]
    follow.resume(api, "f", {"approve": True})
    assert asked[4:] == ["POST", "POST"]


def test_a_prefect_that_stays_busy_is_named(busy: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BUSY_S", -1.0)
    with pytest.raises(UserError, match="answered 503"):
        follow.state_of(busy[0], "f")
