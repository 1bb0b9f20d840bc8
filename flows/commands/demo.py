"""`tideforge demo` and `tideforge demo-drift`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tideforge.flows.defaults import demo_endpoint

if TYPE_CHECKING:
    from tideforge.tasks.store import Run

ENDPOINT = click.option(
    "--endpoint",
    "endpoint_file",
    type=click.Path(path_type=Path),
    default=demo_endpoint,
    show_default="deployments/endpoints/smollm2-cpu.yaml, or smollm2-cuda.yaml where there is a GPU",
)
APPROVE = click.option(
    "--approve",
    type=click.Choice(["no", "yes"]),
    default="no",
    show_default=True,
    help="yes: sign as 'unattended demo'",
)


def narrator() -> Callable[[str], None]:
    """Prints lines to standard error with the seconds since the start; standard output is for the report."""
    from rich.console import Console

    console, begin = Console(stderr=True, highlight=False), time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - begin:6.1f}s[/dim]  ", end="")
        console.print(line, markup=False, soft_wrap=True)

    return say


def finish(run: Run) -> dict[str, Any]:
    """The table for people on standard error, the JSON object as the last line of standard output."""
    from rich.console import Console
    from rich.table import Table

    from tideforge.tasks.report import compute, rows

    facts = compute(run)
    table = Table("field", "value", title=f"run {run.id}")
    for row in rows(facts):
        table.add_row(*row)
    Console(stderr=True).print(table)
    click.echo(json.dumps(facts, sort_keys=True))
    return facts


@click.command()
@ENDPOINT
@APPROVE
@click.option("--fast", is_flag=True, help="a minute of search instead of the endpoint's budget")
def demo(endpoint_file: Path, approve: str, fast: bool) -> None:
    """The whole night on one machine, on real input, from an empty state folder.

    Starts Prefect, MLflow, the endpoint's server and a Prefect worker; sends a little traffic; runs the night through
    the deployment; when it waits for approval, says how to approve (--approve yes: signs itself, as 'unattended demo',
    and the release says so for good); ships; prints the report. Everything stays up to look at until `tideforge down`.

    The last line of standard output is one JSON object, the same as `tideforge report RUN --json`.
    """
    from tideforge.flows import demo as steps
    from tideforge.flows.commands.stack import show
    from tideforge.tasks import stack
    from tideforge.tasks.endpoint import Endpoint
    from tideforge.tasks.machine import check_endpoint

    say = narrator()
    check_endpoint(Endpoint.load(endpoint_file))
    steps.fresh_state(Endpoint.load(endpoint_file), say)
    file, endpoint = steps.endpoint_for(endpoint_file, fast)
    approver = steps.make_approver(endpoint, approve == "yes", say)
    say("starting Prefect, MLflow, the server and a worker (a minute)")
    servers = stack.up(file, endpoint)
    show(servers, endpoint.state)
    say(f"{steps.warm_up(servers.server)} requests answered by the incumbent")
    run = steps.night(servers, endpoint, approver, say)
    show(servers, endpoint.state)
    finish(run)


@click.command("demo-drift")
@ENDPOINT
@APPROVE
def demo_drift(endpoint_file: Path, approve: str) -> None:
    """Append shifted traffic to the demo's log and watch what follows. Run `tideforge demo` first.

    The watch flow reads the log, notices, records its decision and emits an event; Prefect's automation starts a night
    with the reason; its report compares the old winner, which serves by now, with the new one on the shifted traffic.
    The night is followed until it ends or waits for a person: what it found ships only with an approver's signature.
    With --approve yes nothing more is signed: the demo's own key ended with the demo.
    """
    from tideforge.errors import UserError
    from tideforge.flows import demo as steps
    from tideforge.tasks import stack
    from tideforge.tasks.endpoint import Endpoint

    say = narrator()
    endpoint = Endpoint.load(endpoint_file)
    known = stack.Stack.read(endpoint.state)
    if known is None:
        raise UserError(str(endpoint.state), "holds no demo", "run `tideforge demo` first")
    servers = stack.up(Path(known.endpoint), Endpoint.load(Path(known.endpoint)))
    say(f"appended {steps.append_shift(endpoint)}")
    run = steps.drift_night(servers, endpoint, say)
    facts = finish(run)
    if facts["best_ratio"] is None:
        click.echo("the old winner stays: no candidate was faster on the shifted traffic beyond doubt", err=True)
    else:
        old, new = facts["incumbent_tps"], facts["finalist_tps"]
        interval = f"[{facts['ci_low']:.3f}, {facts['ci_high']:.3f}]"
        text = f"old winner {old:.1f} tokens/s, new {new:.1f}: {facts['best_ratio']:.3f} {interval}"
        click.echo(f"on the shifted traffic: {text}", err=True)
