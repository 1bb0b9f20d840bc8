"""The command line. Each command lives in a module of flows/commands and is imported only when it is called."""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any

import click

from tideforge import __version__
from tideforge.errors import PREFIX, TideforgeError, UserError

# name -> (module in flows/commands, attribute, one line for the overview)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "rank": ("rank", "rank", "rank parallel layouts for a model, hardware and traffic"),
    "evaluate-ranking": ("rank", "evaluate_ranking", "score the cost model against measured layouts"),
    "ingest": ("traffic", "ingest", "check traffic logs against the schema and store them as Parquet"),
    "profile": ("traffic", "profile", "make or show the profile of a traffic log"),
    "serve": ("serve", "serve", "serve an endpoint over an OpenAI-compatible HTTP API"),
    "node": ("nodes", "node", "run one node of a night alone, from its files"),
    "engine": ("engine", "engine", "try candidates by hand: the persistent engine outside a night"),
    "verify": ("verify", "verify", "run the gates of verification on one forward, alone"),
    "recompile": ("recompile", "recompile", "run the whole night for an endpoint"),
    "watch": ("recompile", "watch", "look for drift once and start a recompile if it is worth one"),
    "drift": ("recompile", "drift", "show what the looks for drift decided, and why"),
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
    """Runs the command line and exits; an error becomes one line on standard error. Code 2: the user can mend it."""
    try:
        code = cli.main(args=argv, prog_name="tideforge", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        _say(misused(error))
        sys.exit(2)
    except click.Abort:
        _say("stopped")
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _say(unusable(error))
        sys.exit(2)
    except (click.ClickException, TideforgeError) as error:
        _say(error.format_message() if isinstance(error, click.ClickException) else error)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _say(error: object) -> None:
    click.echo(f"{PREFIX}{error}", err=True)


def misused(error: click.UsageError) -> UserError:
    """Click's own complaint about an option or argument, in this project's form."""
    path = error.ctx.command_path if error.ctx else "tideforge"
    thing, problem = path, error.format_message()
    if isinstance(error, click.BadParameter) and error.param is not None:
        options = [name for name in error.param.opts if name.startswith("--")]
        thing = options[0] if options else str(error.param.name).upper()
        problem = "is missing" if isinstance(error, click.MissingParameter) else error.message
    elif isinstance(error, click.NoSuchOption):
        near = f" (did you mean {', '.join(error.possibilities)}?)" if error.possibilities else ""
        thing, problem = error.option_name, f"no such option{near}"
    elif isinstance(error, click.BadOptionUsage):
        thing, problem = error.option_name, "has no value, or one too many"
    return UserError(thing, " ".join(problem.split()).rstrip("."), f"see `{path} --help`")


REMEDIES = {
    errno.ENOTDIR: "a part of that path is a file: name a path below folders",
    errno.ENOENT: "name a path that exists",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "change its permissions or name another path",
    errno.EPERM: "change its permissions or name another path",
    errno.EROFS: "name a path on a disk that can be written",
    errno.ENOSPC: "free space there or name another path",
    errno.EDQUOT: "free space there or name another path",
    errno.ENAMETOOLONG: "name a shorter path",
}


def unusable(error: OSError) -> UserError:
    """A path that the system refuses. Most come from the command line or from the endpoint file."""
    problem = f"cannot be used ({(error.strerror or type(error).__name__).lower()})"
    return UserError(str(error.filename or "the disk"), problem, REMEDIES.get(error.errno or 0, "name another path"))


if __name__ == "__main__":
    main()
