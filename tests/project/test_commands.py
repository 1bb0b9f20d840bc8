from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tideforge.flows.cli import COMMANDS, cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_says_what_it_does(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.help and len(command.help) > 40
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0 and "Usage:" in result.output


def test_the_readme_names_only_commands_and_targets_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`tideforge ([a-z-]+)", text)) | set(re.findall(r"^tideforge ([a-z-]+)", text, re.M))
    assert named and named <= set(COMMANDS), named - set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    wanted = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.M))
    assert wanted and wanted <= targets, wanted - targets


def options(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_commands_about_one_thing_take_the_same_options() -> None:
    """An endpoint's state folder, the signer's name, JSON: where one command has it, so do those beside it."""
    with_endpoint = {name for name in COMMANDS if "--endpoint" in options(name)}
    makes_it, needs_none = {"up", "demo", "demo-drift"}, {"rank"}
    assert {name for name in with_endpoint if "--state" not in options(name)} == makes_it | needs_none
    signs = {"approve", "reject", "code", "rollback"}
    assert {name for name in COMMANDS if "--who" in options(name)} == signs
    lists = {
        "rank",
        "evaluate-ranking",
        "ingest",
        "profile",
        "node",
        "verify",
        "drift",
        "report",
        "approver",
        "releases",
        "weights",
    }
    assert {name for name in COMMANDS if "--json" in options(name)} == lists
    assert {name for name in COMMANDS if "--local" in options(name)} == {"recompile", "watch"}
