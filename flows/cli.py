"""The command line. Each command lives in a module of flows/commands and is imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from tideforge import __version__
from tideforge.errors import TideforgeError, UserError

# name -> (module in flows/commands, attribute, one line for the overview)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "rank": ("rank", "rank", "rank parallel layouts for a model, hardware and traffic"),
    "ingest": ("traffic", "ingest", "check traffic logs against the schema and store them as Parquet"),
    "profile": ("traffic", "profile", "make or show the profile of a traffic log"),
    "serve": ("serve", "serve", "serve an endpoint over an OpenAI-compatible HTTP API"),
    "node": ("nodes", "node", "run one node of a night alone, from its files"),
    "engine": ("engine", "engine", "try candidates by hand: the persistent engine outside a night"),
    "recompile": ("recompile", "recompile", "run the whole night for an endpoint"),
    "watch": ("recompile", "watch", "look for drift once and start a recompile if it is worth one"),
    "report": ("report", "report", "recompute every figure of a run from its archive"),
    "approve": ("release", "approve", "approve a waiting run: sign its release and resume the flow"),
    "reject": ("release", "reject", "reject a waiting run"),
    "code": ("release", "code", "print the one-time code for the approval form of a run"),
    "approver": ("release", "approver", "list an endpoint's approvers, or make yourself one"),
    "releases": ("release", "releases", "list the releases of an endpoint"),
    "rollback": ("release", "rollback", "put an earlier release back into the running server"),
    "up": ("stack", "up", "start the servers: Prefect, MLflow, the endpoint's HTTP server, a worker"),
    "down": ("stack", "down", "stop what `up` started"),
    "demo": ("demo", "demo", "the whole night on one machine, on real input"),
    "demo-drift": ("demo", "demo_drift", "append shifted traffic to the log and watch what follows"),
    "weights": ("weights", "weights", "fetch and convert the demo's model weights"),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(f"tideforge.flows.commands.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tideforge")
def cli() -> None:
    """Keep LLM endpoints fast while their traffic changes. Every command has its own --help."""


def main(argv: list[str] | None = None) -> Any:
    """Runs the command line; a UserError becomes one line on standard error and exit code 2."""
    try:
        return cli.main(args=argv, prog_name="tideforge")
    except UserError as error:
        click.echo(f"tideforge: {error}", err=True)
        sys.exit(2)
    except TideforgeError as error:
        click.echo(f"tideforge: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
