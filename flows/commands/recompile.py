"""`tideforge recompile`, `tideforge watch` and `tideforge drift`."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tideforge.flows.commands.options import STATE, load

if TYPE_CHECKING:
    from tideforge.tasks.endpoint import Endpoint

FILE = click.option(
    "--endpoint", "endpoint_file", type=click.Path(path_type=Path), required=True, help="endpoint file (YAML)"
)
LOCAL = click.option("--local", is_flag=True, help="in this process, not through the deployment")


@click.command()
@FILE
@click.option("--run", "run_id", help="resume this run: nodes that have finished are not run again")
@click.option("--reason", default="by hand", show_default=True, help="kept in the run's record")
@STATE
@LOCAL
@click.option("--no-ship", is_flag=True, help="end after verification: needs no server, and releases nothing")
def recompile(
    endpoint_file: Path, run_id: str | None, reason: str, state: Path | None, local: bool, no_ship: bool
) -> None:
    """Run the whole night for an endpoint: from the traffic log to a release that a person has approved.

    Where a Prefect server is up (`tideforge up`, or PREFECT_API_URL), the night runs through the deployment: it leaves
    this machine's attention and waits for approval, suspended. Otherwise, and with --local, it runs in this process
    and waits here until `tideforge approve RUN` or `reject RUN` is called in another terminal.

    The endpoint must be served (`tideforge up` or `serve`), for a release is bound to the server that takes it. With
    --no-ship the night ends with the verdict; called again with its --run and without --no-ship it goes on from there.

    A night that was killed goes on with the same --run. It ends without shipping when no candidate is faster beyond
    doubt or verification fails; `tideforge report RUN` says which.

    \b
    tideforge recompile --endpoint deployments/endpoints/smollm2-cpu.yaml
    tideforge recompile --endpoint my.yaml --local --run 20261130-020000-1f2e
    """
    from tideforge.tasks.live import check_server
    from tideforge.tasks.machine import check_endpoint

    endpoint = load(endpoint_file, state)
    api = reachable(endpoint, local)
    if endpoint.tracking_uri:
        from tideforge.tasks.night import check_mlflow

        check_mlflow(endpoint.tracking_uri)
    check_endpoint(endpoint)
    if not no_ship:
        check_server(endpoint, str(endpoint_file))
    if run_id is None:
        from tideforge.tasks.night import new_run_id

        run_id = new_run_id()
    click.echo(f"run {run_id}", err=True)
    asked: dict[str, Any] = {
        "endpoint": str(endpoint_file.resolve()),
        "run": run_id,
        "reason": reason,
        **elsewhere(state),
    }
    if local or api is None:
        _here({**asked, "approve": "no" if no_ship else "wait"})
    else:
        _deployed(api, endpoint, {**asked, "approve": "no" if no_ship else "form"})


def reachable(endpoint: Endpoint, local: bool = False) -> str | None:
    """URL of the Prefect API to use, None for one of this process's own. UserError when a named one does not answer."""
    from tideforge.tasks import stack
    from tideforge.tasks.night import check_prefect

    named = os.environ.get("PREFECT_API_URL")
    running = stack.use(endpoint.state)
    if named:
        os.environ["PREFECT_API_URL"] = named
    api = named or (running.prefect_api if running else None)
    if api is None:
        return None
    if local and not named:
        from contextlib import suppress

        from tideforge.errors import UserError

        with suppress(UserError):  # a stack that is down: a local run brings its own Prefect
            check_prefect(api)
            return api
        os.environ.pop("PREFECT_API_URL", None)
        return None
    check_prefect(api)
    return api


def elsewhere(state: Path | None) -> dict[str, str]:
    """The flow's parameter, where the state folder is not the endpoint file's."""
    return {} if state is None else {"state": str(state.resolve())}


def _here(parameters: dict[str, Any]) -> None:
    from tideforge.errors import UserError

    home = Path(os.environ["PREFECT_HOME"])
    try:
        home.mkdir(parents=True, exist_ok=True)  # Prefect makes no parents, and then waits for its server for ever
    except OSError as error:
        raise UserError(str(home), f"cannot be made ({error.strerror})", "mend the endpoint's `state`") from None
    from tideforge.flows.recompile import recompile as night

    result = night(**parameters)
    click.echo(json.dumps(result["extra"], sort_keys=True))


def _deployed(api: str, endpoint: Endpoint, parameters: dict[str, Any]) -> None:
    from tideforge.errors import TideforgeError
    from tideforge.flows import follow

    run_id, flow_run = parameters["run"], follow.start(api, follow.NIGHTLY, parameters)
    click.echo(f"Prefect: {follow.link(api.removesuffix('/api'), flow_run)}", err=True)
    state = follow.follow(
        api,
        flow_run,
        endpoint,
        lambda line: click.echo(line, err=True),
        until=(*follow.FINAL, "PAUSED"),
        timeout_s=24 * 3600,
    )
    if state["type"] == "PAUSED":
        click.echo(f"run {run_id} waits for approval: tideforge approve {run_id}")
    elif state["type"] == "COMPLETED":
        click.echo(f"run {run_id} ended: tideforge report {run_id}")
    else:
        raise TideforgeError(f"run {run_id} {state['name'].lower()}: {state['message']}")


@click.command()
@FILE
@STATE
@LOCAL
def watch(endpoint_file: Path, state: Path | None, local: bool) -> None:
    """Look once whether traffic has drifted, and say so in <state>/drift/.

    Only rows of the traffic log that are newer than the last profile count. Drift emits the Prefect event
    tideforge.drift.detected; the automation in deployments/prefect.yaml starts a recompile from it.
    """
    from tideforge.flows import follow

    endpoint = load(endpoint_file, state)
    api = reachable(endpoint, local)
    if local or api is None:
        from tideforge.tasks.drift import look

        click.echo(json.dumps(look(endpoint), sort_keys=True))
        return
    flow_run = follow.start(api, follow.HOURLY, {"endpoint": str(endpoint_file.resolve()), **elsewhere(state)})
    ended = follow.follow(api, flow_run, endpoint, lambda line: click.echo(line, err=True), timeout_s=600)
    click.echo(f"watch {ended['name'].lower()}; decisions: {endpoint.state / 'drift'}")


@click.command()
@FILE
@STATE
@click.option("--json", "as_json", is_flag=True, help="print each decision as one JSON object on a line of its own")
def drift(endpoint_file: Path, state: Path | None, as_json: bool) -> None:
    """Show every decision of the looks for drift, `no` too, oldest first: what was seen, what a night would bring and cost.

    \b
    tideforge drift --endpoint my.yaml
    tideforge drift --endpoint my.yaml --json | tail -1
    """
    from tideforge.tasks.watching import decisions

    endpoint = load(endpoint_file, state)
    found = decisions(endpoint.state)
    for decision in found:
        click.echo(json.dumps(decision, sort_keys=True) if as_json else decision_line(decision))
    if not found and not as_json:
        click.echo(f"no look yet in {endpoint.state / 'drift'}: run `tideforge watch`", err=True)


def decision_line(decision: dict[str, Any]) -> str:
    """Records of before the watches lack stakes and refusal."""
    when = datetime.datetime.fromtimestamp(decision["time"], datetime.UTC)
    answer = "recompile" if decision["recompile"] else f"no: {decision.get('refused', 'no drift or cooling down')}"
    stakes = decision.get("stakes")
    weighed = (
        f" [gain {stakes['gain']:.1%} ({stakes['source']}): {stakes['worth_hours']:.2f} device hours saved in "
        f"{stakes['horizon_hours']:g} h, a night takes {stakes['cost_hours']:.2f}]"
        if stakes
        else ""
    )
    return f"{when:%Y-%m-%d %H:%M}  {answer}{weighed}\n    {decision['reason']}"
