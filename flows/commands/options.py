"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tideforge.tasks.endpoint import Endpoint

STATE = click.option("--state", type=click.Path(path_type=Path), help="state folder instead of the endpoint file's")
WHO = click.option("--who", help="the name you expect your key to stand for; another one is an error")


def load(endpoint_file: Path, state: Path | None) -> Endpoint:
    """The endpoint file, with another state folder where one is given."""
    from tideforge.tasks.endpoint import Endpoint

    endpoint = Endpoint.load(endpoint_file)
    return endpoint if state is None else endpoint.model_copy(update={"state": state})
