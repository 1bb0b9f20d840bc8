"""`tideforge report`: the figures of a run, from its archive."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option(
    "--endpoint",
    "endpoint_file",
    type=click.Path(path_type=Path),
    help="endpoint file; else .tideforge/ is looked through",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object on one line")
@click.option("--sync", is_flag=True, help="first write to MLflow what was spooled while it was away")
def report(run: str | None, endpoint_file: Path | None, as_json: bool, sync: bool) -> None:
    """Recompute every figure of RUN from its folder: trials, events, verdict, score and ship record.

    RUN is a run id or the path of a run folder. Without RUN: the newest run of the endpoint.

    \b
    tideforge report 20261130-020000-1f2e --json
    tideforge report --endpoint deployments/endpoints/my.yaml --sync
    """
    from rich.console import Console
    from rich.table import Table

    from tideforge.errors import UserError
    from tideforge.tasks.endpoint import Endpoint
    from tideforge.tasks.night import find_run, runs_root, stored_endpoint
    from tideforge.tasks.report import compute, rows

    endpoint = Endpoint.load(endpoint_file) if endpoint_file else None
    if run is None:
        if endpoint is None:
            raise UserError("RUN", "is missing", "give a run id, or --endpoint FILE for its newest run")
        root = runs_root(endpoint)
        newest = (
            max((path.name for path in root.iterdir() if (path / "run.json").is_file()), default=None)
            if root.is_dir()
            else None
        )
        if newest is None:
            raise UserError(str(root), "holds no run", "start one with `tideforge recompile`")
        run = newest
    found = find_run(run, endpoint)
    if sync:
        from tideforge.tasks.track import sync as retry

        done, left = retry(endpoint or stored_endpoint(found))
        click.echo(f"MLflow: {done} spooled records written, {left} still waiting", err=True)
    facts = compute(found)
    if as_json:
        click.echo(json.dumps(facts, sort_keys=True))
        return
    table = Table("field", "value", title=f"run {found.id}")
    for row in rows(facts):
        table.add_row(*row)
    Console().print(table)
