"""Waiting for a person: the form, and the suspension of the flow run.

The form proves nothing by itself, since whoever reaches Prefect's port can fill it in. What counts is the code in it:
the signature over the release record. A form without it decides nothing, neither way: the run goes back to waiting,
until the release expires.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Literal

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput, delete_flow_run_input, keyset_from_base_key
from pydantic import Field, ValidationError

from tideforge.errors import Refused, TideforgeError
from tideforge.flows.handles import Handle, handle, opened
from tideforge.tasks.store import Run

Approval = Literal["form", "wait", "no"]
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
    """Writes approval.json when the code signs this release and this decision; otherwise says why not, and counts it."""
    from tideforge.tasks.approve import count_refusal
    from tideforge.tasks.approve import decide as check

    run, endpoint = opened(night)
    try:
        check(run, endpoint, **form)
    except Refused as refusal:
        count_refusal(run, form, str(refusal))
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
    same = (night["endpoint"], runtime.flow_run.parameters.get("state"))
    gone: list[str] = []
    with get_client(sync_client=True) as client:
        for other in client.read_flow_runs(flow_run_filter=waiting):
            if (
                str(other.id) != str(runtime.flow_run.id)
                and tuple(map(other.parameters.get, ("endpoint", "state"))) == same
            ):
                client.set_flow_run_state(other.id, Cancelled(message=f"superseded by run {night['run']}"), force=True)
                gone.append(str(other.id))
    return gone


def approval(night: Handle, release: Handle, mode: Approval) -> Handle:
    """The decision on this night's release; with nothing to release, an empty one at once.

    `form` leaves the machine: the process ends and the body runs again after the form came in. `wait` stays in this
    process until `tideforge approve RUN` has written the decision. Either way it waits until the release expires.
    """
    if not release["outputs"]:
        return {}
    supersede(night)
    expires_at = float(release["extra"]["expires_at"])
    return decided(night) or (_form(night, expires_at) if mode == "form" else _wait(night, expires_at))


def _form(night: Handle, expires_at: float) -> Handle:
    """Each refused form is counted in the run folder, and the count names the next one: after a suspension the body goes
    straight to the form that came in, however many came before it."""
    from tideforge.tasks.approve import describe, refusals

    run, endpoint = opened(night)
    while (left_s := expires_at - time.time()) > 0:
        count, refusal = refusals(run)
        text = f"**Refused: {refusal}** ({count} so far)\n\n" if count else ""
        form = _asked(f"approval-{count}", text + describe(run, endpoint), max(1, int(left_s)))
        refusal = decide(night, form.model_dump())
        if not refusal and (known := decided(night)):
            return known
        get_run_logger().warning("the form was refused: %s", refusal)
        _forget(f"approval-{count}")
    raise expired(run)


def _asked(key: str, text: str, timeout_s: int) -> ApprovalForm:
    """The form that came in under `key`; the first call leaves the machine. What is not of the form's shape says nothing."""
    blank = ApprovalForm.with_initial_data(description=text)
    try:
        return suspend_flow_run(wait_for_input=blank, timeout=timeout_s, key=key)
    except (TypeError, ValidationError):  # Prefect lets anybody store anything as its answer
        return ApprovalForm()


def _forget(key: str) -> None:
    """Prefect keeps nothing of a refused form either: anybody may send any number of them."""
    for stored in keyset_from_base_key(f"suspended-{key}").values():
        with contextlib.suppress(PrefectHTTPStatusError):
            delete_flow_run_input(stored)


def _wait(night: Handle, expires_at: float) -> Handle:
    run, _ = opened(night)
    get_run_logger().info("waiting for `tideforge approve %s` (or reject)", run.id)
    while run.manifest("approval") is None:
        if time.time() > expires_at:
            raise expired(run)
        time.sleep(POLL_S)
    return handle(run.need("approval"))


def expired(run: Run) -> TideforgeError:
    remedy = f"`tideforge node release --endpoint FILE --run {run.id} --again` asks anew"
    return TideforgeError(f"run {run.id}: nobody decided before the release expired; nothing ships; {remedy}")
