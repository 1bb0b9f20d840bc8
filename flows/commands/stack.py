"""`tideforge up` and `tideforge down`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tideforge.flows.commands.options import STATE, load
from tideforge.flows.defaults import demo_endpoint

if TYPE_CHECKING:
    from rich.status import Status

    from tideforge.tasks.stack import Stack

ENDPOINT = click.option(
    "--endpoint",
    "endpoint_file",
    type=click.Path(path_type=Path),
    default=demo_endpoint,
    show_default="deployments/endpoints/smollm2-cpu.yaml, or smollm2-cuda.yaml where there is a GPU",
)


@click.command()
@ENDPOINT
def up(endpoint_file: Path) -> None:
    """Start Prefect, MLflow, the endpoint's HTTP server and a Prefect worker, and deploy the flows.

    Free ports are found; addresses and process ids are kept in <state>/stack.json, logs in <state>/logs/. Everything
    listens on loopback. Running it again starts only what has died, at the same addresses.
    """
    from tideforge.tasks import stack
    from tideforge.tasks.endpoint import Endpoint
    from tideforge.tasks.machine import check_endpoint

    endpoint = Endpoint.load(endpoint_file)
    check_endpoint(endpoint)
    with _spinner("starting; the first time takes a minute"):
        started = stack.up(endpoint_file, endpoint)
    show(started, endpoint.state)


def show(started: Stack, state: Path) -> None:
    click.echo(f"Prefect UI   {started.prefect}")
    click.echo(f"MLflow UI    {started.mlflow}")
    click.echo(f"server       {started.server}   (OpenAI-compatible, {started.server}/v1)")
    click.echo(f"logs         {state / 'logs'}")
    click.echo(f"stop it      tideforge down --endpoint {started.endpoint}")


@click.command()
@ENDPOINT
@STATE
def down(endpoint_file: Path, state: Path | None) -> None:
    """Stop what `tideforge up` started for this endpoint, and nothing else.

    A process is ended only when its id and its start time are those that `up` wrote down.
    """
    from tideforge.tasks import stack

    ended = stack.down(state or load(endpoint_file, None).state)
    click.echo(f"stopped: {', '.join(ended)}" if ended else "nothing was running")


def _spinner(text: str) -> Status:
    from rich.console import Console

    return Console(stderr=True).status(text)
