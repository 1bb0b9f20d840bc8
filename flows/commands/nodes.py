"""`tideforge node NAME`: one node of a night alone, from the files that the nodes before it left."""

from __future__ import annotations

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tideforge.flows.commands.options import STATE, load

if TYPE_CHECKING:
    from tideforge.tasks.endpoint import Endpoint
    from tideforge.tasks.store import Manifest, Run

# name on the command line -> (module in tasks, function, manifest)
NODES = {
    "ingest": ("ingest", "ingest", "ingest"),
    "profile": ("profile", "profile", "profile"),
    "workload": ("profile", "workload", "workload"),
    "rank": ("rank", "rank", "rank"),
    "search": ("search.session", "close_search", "search"),
    "verify": ("verify.node", "verify", "verify"),
    "track": ("track", "track", "track"),
    "release": ("approve", "prepare_release", "release"),
    "ship": ("ship", "ship", "ship"),
    "report": ("report", "report", "report"),
}


@click.command()
@click.argument("name", type=click.Choice(list(NODES)))
@click.option(
    "--endpoint", "endpoint_file", type=click.Path(path_type=Path), required=True, help="endpoint file (YAML)"
)
@STATE
@click.option("--run", "run_id", required=True, help="the night; a new id begins a new one (node ingest)")
@click.option("--again", is_flag=True, help="also when it is done: its manifest is set aside as NAME.json.old first")
@click.option("--json", "as_json", is_flag=True, help="print the manifest as one JSON object")
def node(name: str, endpoint_file: Path, state: Path | None, run_id: str, again: bool, as_json: bool) -> None:
    """Run one node of a night alone.

    A node reads the manifests of the nodes before it in <state>/runs/RUN/ and writes its own last. One whose manifest is
    there with the same inputs is not run again, unless --again. `ship` still needs a signed approval.

    \b
    tideforge node ingest --endpoint my.yaml --run test
    tideforge node profile --endpoint my.yaml --run test
    tideforge node verify --endpoint my.yaml --run 20261130-020000-1f2e --again
    """
    from tideforge.tasks.night import find_run, open_night

    endpoint = load(endpoint_file, state)
    run = open_night(endpoint, run_id, "by hand") if name == "ingest" else find_run(run_id, endpoint)
    module, function, manifest_name = NODES[name]
    stored = run.folder / f"{manifest_name}.json"
    if again and stored.exists():
        stored.replace(stored.with_suffix(".json.old"))
    if name == "search":
        manifest = search(run, endpoint)
    elif name == "workload":
        from tideforge.tasks.corpus import corpus_ids
        from tideforge.tasks.profile import workload

        manifest = workload(run, endpoint, corpus_ids(endpoint))
    else:
        manifest = getattr(importlib.import_module(f"tideforge.tasks.{module}"), function)(run, endpoint)
    if as_json:
        click.echo(json.dumps(manifest.model_dump(mode="json"), sort_keys=True))
        return
    click.echo(f"{name}: done in {manifest.seconds:.1f} s, {stored}")
    for label, output in manifest.outputs.items():
        click.echo(f"  {label}: {run.folder / output.path}")
    for note in manifest.extra.get("notes", ()):
        click.echo(f"  - {note}")


def search(run: Run, endpoint: Endpoint) -> Manifest:
    """The search without Prefect: agents side by side, each a process of its own, until the budget is spent."""
    from tideforge.engine.random_shapes import weights_bytes
    from tideforge.tasks.objective import WORDS, measured
    from tideforge.tasks.search.search import run_agent
    from tideforge.tasks.search.session import close_search, meanwhile, open_search, search_inputs

    if (done := run.done("search", search_inputs(run, endpoint))) is not None:
        return done
    session, share = open_search(run, endpoint), len(endpoint.agents)
    with ThreadPoolExecutor(share) as threads:
        reports = threads.map(
            lambda spec: run_agent(
                spec, session.workspaces / spec.name, session.socket, session.board, session.deadline,
                dollars=endpoint.budget.dollars / share, tokens=endpoint.budget.tokens // share, sandbox=endpoint.sandbox,
                tier=session.tier, figure=WORDS[measured(endpoint).maximize],
                weights_bytes=weights_bytes(endpoint.model, endpoint.precision),
                meanwhile=meanwhile(run, endpoint, session.tier),
            ),
            endpoint.agents,
        )  # fmt: skip
        return close_search(run, endpoint, list(reports))
