"""The live ship: an approved forward takes over new requests while the old one finishes what it began.

Order matters: signature and state are checked first, the new worker is started and warmed beside the old one, and only
then is the code used up and the flip made. Whatever goes wrong before that changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tideforge.engine.core import EngineCore
from tideforge.engine.events import log_event
from tideforge.engine.executor import Executor
from tideforge.engine.forward import Forward
from tideforge.engine.keys import Trusted, replace_file
from tideforge.engine.release import (
    Approved,
    Decision,
    Release,
    ServerState,
    ShipGuard,
    load_forward,
    verify,
)
from tideforge.engine.releases import prepared, shipped_release
from tideforge.engine.scheduler import Request, TokenEvent
from tideforge.engine.serving.identity import Identity
from tideforge.engine.serving.loop import EngineLoop
from tideforge.engine.serving.workers import Fleet
from tideforge.errors import CandidateError, Refused, UserError

WARM_REQUESTS, WARM_PROMPT, WARM_TOKENS = 2, 24, 4
WARM_TIMEOUT_S = 120.0


class Forbidden(Refused):
    """The signature does not hold, or signs something else: HTTP 403. Any other refusal is a conflict: 409."""


class Shipper:
    """Everything that changes what the server serves. Ships are made one after another."""

    def __init__(
        self,
        loop: EngineLoop,
        fleet: Fleet,
        identity: Identity,
        trusted: Trusted,
        on_flip: Callable[[str], None] = lambda forward: None,
    ) -> None:
        self.identity, self.release = identity, ""  # nonce of the release that put the serving forward in place
        self._loop, self._fleet, self._trusted, self._on_flip = loop, fleet, trusted, on_flip
        self._guard = ShipGuard(trusted, self.state, identity.state / "used_nonces.json")
        self._last: Release | None = None
        self._lock = threading.Lock()

    def state(self) -> ServerState:
        identity = self.identity
        return ServerState(
            forward=self._loop.current,
            weights_sha256=identity.weights_sha256,
            launch=identity.launch,
            environment=identity.environment,
            forwards=identity.state / "forwards",
            runs=identity.state / "runs",
        )

    def open(self, first: Forward) -> str:
        """Starts the forward that was shipped last if it still fits this server, else `first`; what there is to say of that."""
        notes: list[str] = []
        release = shipped_release(self.identity.state / "releases", self._trusted, notes.append)
        first.save(self.identity.state / "forwards")
        forward = first
        if release is not None:
            try:
                forward = self._shipped(release)
                self.release, self._last = release.nonce, release
            except Refused as refusal:
                notes.append(f"the forward shipped last is not served: {refusal}")
        self._attach(forward)
        self._fleet.confirm(forward.id)
        self._loop.call(lambda core: setattr(self._loop, "current", forward.id)).result()
        return "; ".join(notes)

    def _shipped(self, release: Release) -> Forward:
        for name in ("weights_sha256", "launch"):
            if getattr(release, name) != getattr(self.identity, name):
                raise Refused(f"the server's {name} differs from the approved one")
        if sorted(release.environment) != sorted(self.identity.environment):
            raise Refused("the server's environment differs from the approved one")
        return load_forward(self.identity.state / "forwards", release.forward)

    def ship(self, record: Any, code: Any, decision: Decision = Decision.APPROVE) -> dict[str, Any]:
        """Verify, stage, warm, flip. Raises Forbidden or Refused, and then nothing has changed."""
        with self._lock:
            approved = self._check(record, code, decision)
            forward = load_forward(self.identity.state / "forwards", approved.release.forward)
            begin = time.monotonic()
            fresh = self._stage(forward)
            try:
                self._accept(approved, record, code)
            except Refused:
                self._unstage(forward.id, fresh)
                raise
            self.release, self._last = approved.release.nonce, approved.release
            flipped = self._flip(forward.id, str(decision))
            return {**flipped, "release": self.release, "who": approved.who, "seconds": time.monotonic() - begin}

    def _accept(self, approved: Approved, record: Any, code: str) -> None:
        """Uses the code up, and keeps what a later start serves and `releases` lists. Both or neither, on a full disk too."""
        said = {"who": approved.who, "key_id": approved.key_id, "decision": str(approved.decision)}
        entry = {"record": record, "code": code, **said, "shipped_at": time.time()}
        folder = self.identity.state / "releases"
        try:
            with prepared(folder, approved.release.forward, entry) as keep:
                self._guard.accept(record, code, approved.decision)
                keep()
        except OSError as error:
            why = f"{folder} takes no file ({error.strerror}): nothing has changed"
            raise Refused(f"{why}; free space there and ship again, the code is still good") from None

    def flip(self, nonce: str, to: str, done: bool = False) -> dict[str, Any]:
        """For measuring: serves the other forward of the release shipped last. The one that is `done` is the last."""
        with self._lock:
            begin, target = time.monotonic(), self._guard.flip(nonce, to, done)
            self._stage(load_forward(self.identity.state / "forwards", target))
            if self._last is not None:
                self.release = self._last.nonce if to == "forward" else self._last.previous
            flipped = {**self._flip(target, "flip"), "release": self.release, "seconds": time.monotonic() - begin}
            if done:
                with contextlib.suppress(OSError):  # closed all the same, until a restart
                    self._guard.close()
            return flipped

    def _check(self, record: Any, code: Any, decision: Decision) -> Approved:
        try:
            approved = verify(record, code, self._trusted)
        except Refused as refusal:
            raise Forbidden(str(refusal)) from None
        if approved.decision is not decision:
            raise Forbidden(f"the code signs {approved.decision}, not {decision}")
        if approved.release.endpoint != self.identity.endpoint:
            raise Refused(f"the release is for endpoint {approved.release.endpoint}, this is {self.identity.endpoint}")
        return self._guard.check(record, code, decision)

    # staging

    def _stage(self, forward: Forward) -> bool:
        """The forward is up and has answered. True if it had to be started; one that still drains is simply kept."""

        def kept(core: EngineCore) -> bool:
            self._loop.keep(forward.id)
            return forward.id in core.forwards

        if self._loop.call(kept).result():
            return False
        try:
            self._attach(forward)
            self._warm(forward.id)
        except (CandidateError, UserError, TimeoutError, OSError) as error:
            self._unstage(forward.id, fresh=True)
            raise Refused(f"forward {forward.id[:12]} does not start here: {error}") from None
        return True

    def _attach(self, forward: Forward) -> None:
        executor = self._fleet.start(forward)
        budget = forward.knobs.get("max_num_batched_tokens")
        self._loop.call(lambda core: core.attach(forward.id, executor, budget)).result()

    def _warm(self, forward_id: str) -> None:
        """A few real requests through the scheduler: their blocks are their own, so live ones cannot be touched."""
        endings: list[Future[None]] = []
        for index in range(WARM_REQUESTS):
            ended: Future[None] = Future()

            def deliver(event: TokenEvent, ended: Future[None] = ended) -> None:
                if event.finish == "failed":
                    ended.set_exception(CandidateError("forward_error", "it fails on a first request"))
                elif event.finish:
                    ended.set_result(None)

            prompt = tuple(range(3 + index, 3 + index + WARM_PROMPT))
            request = Request(f"warm-{uuid.uuid4().hex}", prompt, WARM_TOKENS, forward=forward_id)
            self._loop.submit(request, deliver).result()
            endings.append(ended)
        for ended in endings:
            ended.result(WARM_TIMEOUT_S)

    def _unstage(self, forward_id: str, fresh: bool) -> None:
        """Back to before `_stage`: one that it started goes, one that it kept drains on, the serving one stays."""
        if fresh:
            self._loop.expel(forward_id).result()
            self._fleet.end(forward_id)
        elif forward_id != self._loop.current:
            self._retire(forward_id)

    def _retire(self, forward_id: str) -> None:
        def left(executor: Future[Executor]) -> None:
            if not executor.cancelled():
                self._fleet.end(forward_id)
                log_event(self.identity.state, "drained", forward=forward_id)

        self._loop.retire(forward_id).add_done_callback(left)

    # the flip

    def _flip(self, forward_id: str, why: str) -> dict[str, Any]:
        """New requests go to `forward_id` from the next step on; the previous one leaves once its own are done."""

        def turn(core: EngineCore) -> tuple[str, int, float]:
            previous, self._loop.current = self._loop.current, forward_id
            return previous, len(core.scheduler.requests(previous)), time.time()

        previous, finishing, at = self._loop.call(turn).result()
        self._fleet.confirm(forward_id)
        if previous != forward_id:
            self._retire(previous)
        try:
            self._on_flip(forward_id)
        except OSError as error:  # the flip has happened: a file that names the old forward must not undo the answer
            log_event(self.identity.state, "server_file_stale", forward=forward_id, error=str(error))
        log_event(self.identity.state, "flip", forward=forward_id, previous=previous, why=why, finishing=finishing)
        return {
            "forward": forward_id, "previous": previous, "finishing": finishing, "flipped_at": at, "why": why,
        }  # fmt: skip


def write_server_file(state: Path, pid: int, url: str, forward: str) -> None:
    """server.json appears whole or not at all; it is rewritten at every flip."""
    replace_file(state / "server.json", json.dumps({"pid": pid, "url": url, "forward": forward}).encode())
