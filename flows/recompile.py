"""The night as a Prefect flow. The body is the DAG; each node is a plain function of tasks/, wrapped here.

Nodes hand over manifests: paths and hashes. After a suspension the body runs again from the top: Prefect serves
finished tasks from their results, and a node whose manifest is in the run folder does not run again either, so that a
killed flow resumes too (`tideforge recompile --run ID`). Side effects are inside tasks only.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, runtime, task, unmapped
from prefect.context import TaskRunContext

from tideforge.data.files import canonical_json, sha256_bytes
from tideforge.flows.approval import Approval, approval
from tideforge.flows.handles import Handle, handle, opened
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Manifest


def cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """One result a flow run, task and input: all nodes share one source, so the task's name tells them apart."""
    digest = sha256_bytes(canonical_json([context.task.name, parameters]))
    return f"{context.task_run.flow_run_id}-{context.task.name}-{digest[:32]}"


STORED: dict[str, Any] = {"persist_result": True, "result_serializer": "json", "cache_key_fn": cache_key}


def node(module: str, function: str) -> Any:
    """The function `tideforge.tasks.<module>.<function>(run, endpoint)` as a task; `before` only orders the DAG."""

    @task(name=function, **STORED)
    def wrapped(night: Handle, *before: Handle) -> Handle:
        call: Callable[..., Manifest] = getattr(importlib.import_module(f"tideforge.tasks.{module}"), function)
        return handle(call(*opened(night)))

    return wrapped


@task(**STORED)
def start_run(
    endpoint: str, run: str | None, reason: str, traffic: str | None, approve: Approval, state: str | None
) -> Handle:
    from tideforge.tasks.live import check_server
    from tideforge.tasks.night import check_mlflow, open_night

    loaded = Endpoint.load(Path(endpoint))
    if state:
        loaded = loaded.model_copy(update={"state": Path(state)})
    if loaded.tracking_uri:
        check_mlflow(loaded.tracking_uri)
    if approve != "no":
        check_server(loaded, endpoint)
    if traffic:
        loaded = loaded.model_copy(update={"traffic": loaded.traffic.model_copy(update={"logs": [traffic]})})
    night = open_night(loaded, run, reason, str(runtime.flow_run.id or ""))
    facts = {"endpoint": endpoint, "run": night.id, "folder": str(night.folder.resolve())}
    return {**facts, "agents": len(loaded.agents)}


@task(**STORED)
def workload(night: Handle, shapes: Handle) -> Handle:
    from tideforge.tasks.corpus import corpus_ids
    from tideforge.tasks.profile import workload as sample

    run, endpoint = opened(night)
    return handle(sample(run, endpoint, corpus_ids(endpoint)))


@task(**STORED)
def open_search(night: Handle, load: Handle) -> Handle:
    """The engine of the night, running; how agents reach it. Empty when the search of this night is over already."""
    from tideforge.tasks.search.session import open_search as begin
    from tideforge.tasks.search.session import search_inputs

    run, endpoint = opened(night)
    if run.done("search", search_inputs(run, endpoint)):
        return {}
    return {name: str(value) for name, value in dataclasses.asdict(begin(run, endpoint)).items()}


@task(task_run_name="agent-{number}", **STORED)
def run_agent(night: Handle, session: Handle, number: int) -> Handle:
    """One agent: a process of its own with its own kill timer (Prefect cannot interrupt a mapped task that blocks)."""
    from tideforge.engine.random_shapes import weights_bytes
    from tideforge.tasks.objective import WORDS, measured
    from tideforge.tasks.search.search import run_agent as launch
    from tideforge.tasks.search.session import meanwhile

    if not session:
        return {}
    run, endpoint = opened(night)
    spec, budget, share = endpoint.agents[number], endpoint.budget, len(endpoint.agents)
    report = launch(
        spec,
        Path(session["workspaces"]) / spec.name,
        Path(session["socket"]),
        Path(session["board"]),
        float(session["deadline"]),
        dollars=budget.dollars / share,
        tokens=budget.tokens // share,
        sandbox=endpoint.sandbox,
        tier=str(session["tier"]),
        figure=WORDS[measured(endpoint).maximize],
        weights_bytes=weights_bytes(endpoint.model, endpoint.precision),
        meanwhile=meanwhile(run, endpoint, str(session["tier"])),
    )
    return report.model_dump(mode="json")


@task(**STORED)
def close_search(night: Handle, agents: list[Handle]) -> Handle:
    """Ends the engine; trials, board and finalist as files."""
    from tideforge.tasks.search.agent import AgentReport
    from tideforge.tasks.search.session import close_search as end

    return handle(end(*opened(night), [AgentReport(**report) for report in agents if report]))


@task(**STORED)
def prepare_release(night: Handle, tracked: Handle, approve: Approval) -> Handle:
    from tideforge.tasks.approve import prepare_release as prepare

    run, endpoint = opened(night)
    return handle(prepare(run, endpoint, wanted=approve != "no"))


ingest = node("ingest", "ingest")
profile = node("profile", "profile")
rank = node("rank", "rank")
verify = node("verify.node", "verify")
track = node("track", "track")
ship = node("ship", "ship")
report = node("report", "report")


@flow(name="recompile", flow_run_name="{reason}", persist_result=True, result_serializer="json")
def recompile(
    endpoint: str,
    run: str | None = None,
    reason: str = "by hand",
    approve: Approval = "form",
    traffic: str | None = None,
    state: str | None = None,
) -> Handle:
    """One night: from the traffic log to a release that a person has approved.

    `endpoint` is the path of its file. `traffic` replaces the endpoint's logs: after drift, the rows that drifted.
    `approve` "no": the night ends with the verdict, and needs no server. `state` replaces the endpoint's state folder.
    """
    night = start_run(endpoint, run, reason, traffic, approve, state)
    requests = ingest(night)
    shapes = profile(night, requests)
    load = workload(night, shapes)
    layouts = rank(night, shapes)
    session = open_search(night, load)
    agents = run_agent.map(unmapped(night), unmapped(session), list(range(night["agents"]))).result()
    trials = close_search(night, agents)
    verdict = verify(night, trials)
    tracked = track(night, layouts, verdict)
    release = prepare_release(night, tracked, approve)
    decision = approval(night, release, approve)  # the run leaves the machine here and waits for a person
    shipped = ship(night, release, decision)
    return report(night, shipped)
