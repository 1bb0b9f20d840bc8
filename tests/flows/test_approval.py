"""Waiting for a person: only a signature ends it, or the release's expiry, whatever else comes in through Prefect."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from tideforge.engine import release as rel
from tideforge.engine.release import Decision, Gain, Release
from tideforge.errors import TideforgeError
from tideforge.flows import approval as waiting
from tideforge.flows.handles import Handle, handle
from tideforge.tasks.approve import REFUSED_KEPT, refusals
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Run

pytestmark = [
    pytest.mark.timeout(240),
    # prefect, its server and sqlite leave sockets and coroutines to the garbage collector; none of it is ours
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


class Suspended(BaseException):
    """The flow's process has left the machine."""


def night(endpoint_file: Path, expires_in_s: float = 600) -> tuple[Run, Release]:
    """A run whose release waits, with as much of its folder as waiting reads."""
    endpoint, now = Endpoint.load(endpoint_file), int(time.time())
    run = Run.create(endpoint.state / "runs", "n1")
    run.finish("run", {}, {"endpoint": run.write_json("endpoint", endpoint.model_dump(mode="json"))}, {})
    release = Release(
        run="n1", endpoint="tiny", forward="f" * 64, incumbent="a" * 64, layout="unchanged", weights_sha256="w",
        launch="serve", environment=(), verdict_sha256="v", gain=Gain(), created_at=now,
        expires_at=int(now + expires_in_s), previous="", go_back="rollback",
    )  # fmt: skip
    outputs = {
        "record": run.write_json("release", release.to_record()),
        "form": run.write_bytes("form", ".md", b"## look at this\n"),
    }
    run.finish("release", {}, outputs, {"waits": True, "expires_at": release.expires_at})
    return run, release


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str, int]]]:
    """`prefect(run, forms)` lets the flow wait in a place that resumes it with each of the forms, then no more.

    Answers with what it was asked: key, description, timeout.
    """

    def resumed_with(run: Run, forms: list[Any], mode: Any = "form") -> list[tuple[str, str, int]]:
        asked: list[tuple[str, str, int]] = []

        def suspend(wait_for_input: Any, timeout: int, key: str) -> Any:
            asked.append((key, wait_for_input._description, timeout))
            if len(asked) > len(forms):
                raise Suspended
            form = forms[len(asked) - 1]
            return wait_for_input(**form)

        @flow(name="waits")
        def waits(night: Handle, release: Handle) -> Handle:
            return waiting.approval(night, release, mode)

        monkeypatch.setattr(waiting, "suspend_flow_run", suspend)
        monkeypatch.setattr(waiting, "supersede", lambda night: [])
        facts = {"endpoint": "tiny.yaml", "run": run.id, "folder": str(run.folder)}
        waits(facts, handle(run.need("release")))
        return asked

    return resumed_with


UNSIGNED: list[Any] = [
    {},
    {"approve": False, "who": "Ann Other", "why": "throw it away"},
    {"approve": True, "code": "please", "who": "x" * 5000, "why": "y" * 5000},
    {"approve": False, "code": "f" * 12 + "." + "A" * 86},
    [1],
]


def test_no_number_of_unsigned_forms_ends_the_wait(prefect_server: None, tiny_endpoint: Path, prefect: Any) -> None:
    run, release = night(tiny_endpoint)
    key = rel.create_key(run.folder.parent / "key.pem", "correct horse")
    rel.add_approver(run.folder.parent.parent / "approvers.json", "Ann", rel.public_bytes(key))
    forms = [*UNSIGNED] * 6
    for part in (forms[:25], forms[25:]):  # as many as twenty once ended the run; and a restart in between
        with pytest.raises(Suspended):
            prefect(run, part)
    assert run.manifest("approval") is None
    count, reason = refusals(run)
    assert count == 30 and "no signature" in reason
    kept = run.folder / "refused.json"
    assert len(kept.read_text()) < REFUSED_KEPT * 1000 and kept.read_text().count('"at"') == REFUSED_KEPT

    code = rel.sign(key, release, Decision.REJECT, "Ann")
    asked = prefect(run, [{"approve": False, "code": code, "why": "too clever"}])
    ((key_name, text, timeout_s),) = asked
    assert key_name == "approval-30", "no form is looked at twice"
    assert "no signature" in text and "30 so far" in text and "## look at this" in text and 0 < timeout_s <= 600
    facts = run.need("approval").extra
    assert (facts["decision"], facts["who"], facts["signed"]) == ("reject", "Ann", True)


@pytest.mark.parametrize("mode", ["form", "wait"])
def test_the_wait_ends_when_the_release_expires(
    prefect_server: None, tiny_endpoint: Path, prefect: Any, mode: str
) -> None:
    run, _ = night(tiny_endpoint, expires_in_s=-1)
    with pytest.raises(TideforgeError, match="nobody decided before the release expired"):
        prefect(run, [], mode)
    assert run.manifest("approval") is None
