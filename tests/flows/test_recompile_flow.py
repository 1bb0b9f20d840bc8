"""The flow around its nodes: order, resuming by run id, an honest end without a candidate. Search and engine are doubles."""

from __future__ import annotations

import collections
import time
from pathlib import Path
from typing import Any

import pytest

from tideforge.engine.events import log_event
from tideforge.errors import TideforgeError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.search.agent import AgentReport
from tideforge.tasks.search.session import Session
from tideforge.tasks.store import Manifest, Run

pytestmark = [
    pytest.mark.timeout(240),
    # prefect, its server and sqlite leave sockets and coroutines to the garbage collector; none of it is ours
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> collections.Counter[str]:
    """Counts what ran; the engine and the agents are replaced by what they leave behind."""
    count: collections.Counter[str] = collections.Counter()

    def open_search(run: Run, endpoint: Endpoint) -> Session:
        count["open_search"] += 1
        if count["open_search"] == 1:
            raise TideforgeError("the machine went away")
        return Session(tmp_path / "sock", tmp_path / "board", tmp_path / "agents", time.time() + 5)

    def run_agent(spec: Any, *args: Any, **more: Any) -> AgentReport:
        count[spec.name] += 1
        return AgentReport(name=spec.name, kind=spec.kind, reason="done")

    def close_search(run: Run, endpoint: Endpoint, reports: list[AgentReport]) -> Manifest:
        count["reports"] = len(reports)
        outputs = {"trials": run.write_json("trials", []), "board": run.write_bytes("board", ".jsonl", b"")}
        log_event(run.folder, "service_start")
        (run.folder / "tuned.json").write_text('{"served": "", "incumbent": ""}')
        return run.finish("search", {}, outputs, {"finalist": None, "incumbent": "", "served": ""})

    def track(run: Run, endpoint: Endpoint) -> Manifest:
        return run.finish("track", {}, {}, {})

    for name, function in (
        ("search.session.open_search", open_search),
        ("search.search.run_agent", run_agent),
        ("search.session.close_search", close_search),
        ("track.track", track),
    ):
        monkeypatch.setattr(f"tideforge.tasks.{name}", function)
    return count


def test_a_night_that_broke_off_goes_on_and_ends_honestly(
    prefect_server: None, tiny_endpoint: Path, calls: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tideforge.flows.recompile import recompile

    def verify(run: Run, endpoint: Endpoint) -> Manifest:
        return run.finish("verify", {}, {}, {"passed": False})

    monkeypatch.setattr("tideforge.tasks.verify.node.verify", verify)
    with pytest.raises(TideforgeError, match="the machine went away"):
        recompile(str(tiny_endpoint), "n1", "first", "no")
    run = Run(Endpoint.load(tiny_endpoint).state / "runs" / "n1")
    before = {name: run.need(name).finished for name in ("ingest", "profile", "workload", "rank")}
    broken_off = run.need("run").extra["flow_run"]
    assert run.manifest("search") is None

    facts = recompile(str(tiny_endpoint), "n1", "second", "no")["extra"]
    assert {name: run.need(name).finished for name in before} == before
    assert run.need("run").extra["flow_run"] != broken_off  # an approval must find the flow run that waits now
    assert (calls["offline-1"], calls["offline-2"], calls["reports"]) == (1, 1, 2)
    assert facts["reason"] == "first" and facts["shipped"] is None and facts["candidates"] == 0
    assert facts["result"] == "no candidate ships: none was faster than the incumbent beyond doubt"
    assert run.manifest("approval") is None


def test_the_body_is_the_dag() -> None:
    """Calls of nodes in order and nothing else: no loop, no branch, no arithmetic."""
    import ast
    import inspect

    from tideforge.flows.recompile import recompile

    body = ast.parse(inspect.getsource(recompile.fn)).body[0].body[1:]  # type: ignore[attr-defined]
    assert all(isinstance(line, ast.Assign | ast.Return) for line in body)
    assert "pause_flow_run" not in inspect.getsource(inspect.getmodule(recompile.fn))  # type: ignore[arg-type]


def test_a_night_that_is_to_ship_says_at_once_that_nobody_serves(
    prefect_server: None, tiny_endpoint: Path, calls: collections.Counter[str]
) -> None:
    """What a scheduled night does, which no command has looked at before."""
    from tideforge.errors import UserError
    from tideforge.flows.recompile import recompile

    with pytest.raises(UserError, match=r"endpoint tiny: no server serves it .*; `tideforge serve --endpoint"):
        recompile(str(tiny_endpoint), "n1", "nightly", "form")
    assert not calls and not Endpoint.load(tiny_endpoint).state.exists()
