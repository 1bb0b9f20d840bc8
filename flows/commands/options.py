"""Options that several commands share."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tideforge.tasks.endpoint import Endpoint

STATE = click.option("--state", type=click.Path(path_type=Path), help="state folder instead of the endpoint file's")


class Finite(click.FloatRange):
    """A range without nan and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return number


WHO = click.option("--who", help="the name you expect your key to stand for; another one is an error")


def load(endpoint_file: Path, state: Path | None) -> Endpoint:
    """The endpoint file, with another state folder where one is given."""
    from tideforge.tasks.endpoint import Endpoint

    endpoint = Endpoint.load(endpoint_file)
    endpoint = endpoint if state is None else endpoint.model_copy(update={"state": state})
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(endpoint.state.stat().st_mode):  # a file further up is an error of its own
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(endpoint.state))
    return endpoint
