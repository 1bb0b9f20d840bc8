"""Starts deployments and follows their runs over Prefect's REST interface, without importing prefect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tideforge.engine.events import read_events
from tideforge.engine.outcome import Trial
from tideforge.errors import TideforgeError, UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.facts import NODES
from tideforge.tasks.night import runs_root
from tideforge.tasks.store import Run

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
BUSY_S = 60.0
NIGHTLY, HOURLY = "recompile/nightly", "watch/hourly"


def patient(method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Asks again while Prefect answers 503, for at most BUSY_S: its sqlite is locked for moments, above all just after a
    flow run was suspended, and nothing has changed then."""
    deadline = time.monotonic() + BUSY_S
    while (answer := httpx.request(method, url, json=body, timeout=30)).status_code == 503:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return answer


def _ask(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    try:
        answer = patient(method, url, body)
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        problem = f"answered {error.response.status_code}: {error.response.text[:200]}"
        raise UserError(url, problem, "run `tideforge up`: it deploys the flows") from None
    except httpx.HTTPError as error:
        raise UserError(url, f"does not answer ({type(error).__name__})", "run `tideforge up`") from None
    return answer.json()


def start(api: str, deployment: str, parameters: dict[str, Any]) -> str:
    """Creates a run of `flow/deployment`; returns Prefect's id of it."""
    found = _ask("GET", f"{api}/deployments/name/{deployment}")
    body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
    return str(_ask("POST", f"{api}/deployments/{found['id']}/create_flow_run", body)["id"])


def state_of(api: str, flow_run: str) -> dict[str, Any]:
    """`type`, `name` and `message` of the run's state."""
    return dict(
        _ask("GET", f"{api}/flow_runs/{flow_run}")["state"] or {"type": "PENDING", "name": "Pending", "message": ""}
    )


def resume(api: str, flow_run: str, form: dict[str, Any]) -> None:
    """Fills in the form of a suspended run. A refused form comes back with status 200, so the body is what counts."""
    answer = _ask("POST", f"{api}/flow_runs/{flow_run}/resume", {"run_input": form})
    if answer["status"] != "ACCEPT":
        raise TideforgeError(
            f"Prefect refused the form: {(answer.get('details') or {}).get('reason', answer['status'])}"
        )


def runs_since(api: str, deployment: str, since: str) -> list[dict[str, Any]]:
    """Runs of a deployment that were created after `since` (ISO time), oldest first, without those a schedule made."""
    found = _ask("GET", f"{api}/deployments/name/{deployment}")
    query = {"deployments": {"id": {"any_": [found["id"]]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 100}
    runs = _ask("POST", f"{api}/flow_runs/filter", query)
    return [run for run in runs if run["created"] > since and not run["auto_scheduled"]]


def link(prefect: str, flow_run: str) -> str:
    return f"{prefect}/runs/flow-run/{flow_run}"


def run_of(endpoint: Endpoint, flow_run: str) -> Run | None:
    """The run folder that this flow run began."""
    root = runs_root(endpoint)
    for folder in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        manifest = Run(folder).manifest("run") if folder.is_dir() else None
        if manifest and manifest.extra.get("flow_run") == flow_run:
            return Run(folder)
    return None


class Tail:
    """New lines about a night since the last look: finished nodes and the engine's events."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.nodes: set[str] = set()
        self.seen = {root: len(list(read_events(root))) for root in self._roots()}

    def _roots(self) -> list[Path]:
        state = self.endpoint.state
        return [state, *(path.parent for path in sorted(state.glob("runs/*/events.jsonl")))]

    def lines(self, run: Run | None) -> Iterator[str]:
        for root in self._roots():
            events = list(read_events(root))
            yield from (describe(event, root) for event in events[self.seen.get(root, 0) :])
            self.seen[root] = len(events)
        for node in NODES if run else ():
            if node not in self.nodes and run and (manifest := run.manifest(node)):
                self.nodes.add(node)
                yield f"node {node} done in {manifest.seconds:.1f} s"


def describe(event: dict[str, Any], root: Path) -> str:
    """An event in one line; the end of a trial with what it measured."""
    facts = {key: str(value)[:60] for key, value in event.items() if key not in ("time", "event", "pid") and value}
    result = root / "trials" / str(event.get("trial")) / "result.json"
    if event["event"] == "trial_end" and result.exists():
        trial = Trial.read(result)
        facts = {"trial": trial.id, "tier": trial.tier, "by": trial.submitter, "outcome": str(trial.outcome)}
        if trial.figures:
            facts["ratio"] = f"{trial.figures.ratio:.3f} [{trial.figures.ci_low:.3f}, {trial.figures.ci_high:.3f}]"
    return f"{event['event']}  " + "  ".join(f"{key}={value}" for key, value in facts.items())


def follow(
    api: str,
    flow_run: str,
    endpoint: Endpoint,
    say: Callable[[str], None],
    until: tuple[str, ...] = FINAL,
    timeout_s: float = 3600,
    tail: Tail | None = None,
) -> dict[str, Any]:
    """Prints progress until the run's state type is one of `until`; returns that state. A `tail` goes on where it was."""
    tail, deadline, last = tail or Tail(endpoint), time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        state = state_of(api, flow_run)
        if state["name"] != last:
            last = state["name"]
            say(f"flow run is {last}" + (f": {state['message']}" if state["message"] else ""))
        for line in tail.lines(run_of(endpoint, flow_run)):
            say(line)
        if state["type"] in until:
            return state
        time.sleep(1.0)
    raise TideforgeError(f"the flow run {flow_run} did not end in {timeout_s:.0f} s; it is still {last}")
