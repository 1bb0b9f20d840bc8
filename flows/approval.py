"""Waiting for a person: the form, and the suspension of the flow run.

The form proves nothing by itself, since whoever reaches Prefect's port can fill it in. What counts is the code in it:
the signature over the release record. A wrong code ships nothing, and the run goes back to waiting.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from tideforge.errors import Refused, TideforgeError
from tideforge.flows.handles import Handle, handle, opened

Approval = Literal["form", "wait"]
ATTEMPTS = 20  # refused codes that a run endures before it gives up
POLL_S = 1.0


class ApprovalForm(RunInput):
    """What Prefect's UI asks for. Bool and text fields only: they work in both of its versions."""

    approve: bool = Field(default=False, description="off: reject this release")
    code: str = Field(default="", description="one-time code that `tideforge code RUN` prints: it is the signature")
    who: str = Field(default="", description="your name")
    why: str = Field(default="", description="a sentence for the record")


@task(cache_policy=NO_CACHE)
def decided(night: Handle) -> Handle | None:
    """The decision that lies in the run folder, if there is one."""
    run, _ = opened(night)
    manifest = run.manifest("approval")
    return None if manifest is None else handle(manifest)


@task(cache_policy=NO_CACHE)
def decide(night: Handle, form: dict[str, Any]) -> str:
    """Writes approval.json when the code signs this release and this decision; otherwise says why not."""
    from tideforge.tasks.approve import decide as check

    try:
        check(*opened(night), **form)
    except Refused as refusal:
        return str(refusal)
    return ""


@task(cache_policy=NO_CACHE)
def supersede(night: Handle) -> list[str]:
    """Cancels older runs of this endpoint that still wait for approval: a newer night makes their figures stale."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType
    from prefect.states import Cancelled

    waiting = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED])))
    gone: list[str] = []
    with get_client(sync_client=True) as client:
        for other in client.read_flow_runs(flow_run_filter=waiting):
            if str(other.id) != str(runtime.flow_run.id) and other.parameters.get("endpoint") == night["endpoint"]:
                client.set_flow_run_state(other.id, Cancelled(message=f"superseded by run {night['run']}"), force=True)
                gone.append(str(other.id))
    return gone


def approval(night: Handle, release: Handle, mode: Approval) -> Handle:
    """The decision on this night's release; with nothing to release, an empty one at once.

    `form` leaves the machine: the process ends and the body runs again after the form came in. `wait` stays in this
    process until `tideforge approve RUN` has written the decision. Either way approval_hours is the most it waits.
    """
    if not release["outputs"]:
        return {}
    supersede(night)
    known = decided(night)
    return known or (_form(night) if mode == "form" else _wait(night))


def _form(night: Handle) -> Handle:
    from tideforge.tasks.approve import describe

    run, endpoint = opened(night)
    described = describe(run, endpoint)
    refusal = ""
    for attempt in range(ATTEMPTS):
        text = (f"**Refused: {refusal}**\n\n" if refusal else "") + described
        form = suspend_flow_run(
            wait_for_input=ApprovalForm.with_initial_data(description=text),
            timeout=int(endpoint.approval_hours * 3600),
            key=f"approval-{attempt}",
        )
        refusal = decide(night, form.model_dump())
        if not refusal and (known := decided(night)):
            return known
        get_run_logger().warning("the form was refused: %s", refusal)
    raise TideforgeError(f"run {night['run']}: {ATTEMPTS} forms in a row carried no valid code; nothing ships")


def _wait(night: Handle) -> Handle:
    run, endpoint = opened(night)
    get_run_logger().info("waiting for `tideforge approve %s` (or reject)", run.id)
    deadline = time.time() + endpoint.approval_hours * 3600
    while run.manifest("approval") is None:
        if time.time() > deadline:
            raise TideforgeError(f"run {run.id}: nobody decided within {endpoint.approval_hours} hours; nothing ships")
        time.sleep(POLL_S)
    return handle(run.need("approval"))
