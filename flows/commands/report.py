"""`tideforge report`: the figures of a run, from its archive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tideforge.flows.commands.options import STATE, load

if TYPE_CHECKING:
    from tideforge.tasks.store import Run


@click.command()
@click.argument("run", required=False)
@click.option(
    "--endpoint",
    "endpoint_file",
    type=click.Path(path_type=Path),
    help="endpoint file; else .tideforge/ is looked through",
)
@STATE
@click.option("--json", "as_json", is_flag=True, help="print one JSON object on one line")
@click.option("--sync", is_flag=True, help="first write to MLflow what was spooled while it was away")
def report(run: str | None, endpoint_file: Path | None, state: Path | None, as_json: bool, sync: bool) -> None:
    """Recompute every figure of RUN from its folder: trials, events, verdict, score and ship record.

    RUN is a run id or the path of a run folder. Without RUN: the newest run of the endpoint or state folder.

    \b
    tideforge report 20261130-020000-1f2e --json
    tideforge report --endpoint deployments/endpoints/my.yaml --sync
    """
    from rich.console import Console
    from rich.table import Table

    from tideforge.tasks.night import stored_endpoint
    from tideforge.tasks.report import compute, rows

    endpoint = load(endpoint_file, state) if endpoint_file else None
    found = chosen(run, endpoint.state if endpoint else state)
    if sync:
        from tideforge.tasks.track import sync as retry

        known = endpoint or stored_endpoint(found)
        done, left = retry(known if state is None else known.model_copy(update={"state": state}))
        click.echo(f"MLflow: {done} spooled records written, {left} still waiting", err=True)
    facts = compute(found)
    if as_json:
        click.echo(json.dumps(facts, sort_keys=True))
        return
    table = Table("field", "value", title=f"run {found.id}")
    for row in rows(facts):
        table.add_row(*row)
    Console().print(table)


def chosen(run: str | None, state: Path | None) -> Run:
    """The run of this id or folder; the newest one of the state folder when none is named."""
    from tideforge.errors import UserError
    from tideforge.tasks.night import find_run
    from tideforge.tasks.store import Run

    if run is not None:
        is_folder = (Path(run) / "run.json").is_file()
        return find_run(run) if state is None or is_folder else Run.open(state / "runs", run)
    if state is None:
        raise UserError("RUN", "is missing", "give a run id, or --endpoint FILE or --state FOLDER for the newest run")
    newest = max((path.parent.name for path in (state / "runs").glob("*/run.json")), default=None)
    if newest is None:
        raise UserError(str(state / "runs"), "holds no run", "start one with `tideforge recompile`")
    return Run.open(state / "runs", newest)
