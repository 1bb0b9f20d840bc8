"""Which forward serves: the live server's, else the one the endpoint names, else the plain one for the architecture."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from tideforge.data.files import read_json
from tideforge.engine.archive import write_atomic
from tideforge.engine.config import ModelConfig
from tideforge.engine.forward import Forward
from tideforge.engine.model_config import model_for
from tideforge.engine.release import load_forward, read_approvers
from tideforge.engine.releases import shipped_release
from tideforge.errors import CandidateError, Refused, UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.live import CHECK_S, version
from tideforge.tasks.store import Run


def first_forward(endpoint: Endpoint) -> Path:
    """The folder of the forward that an endpoint starts with."""
    return endpoint.forward or model_for(ModelConfig.load(endpoint.model).architecture)


def serving_forward(endpoint: Endpoint) -> Forward:
    """What the live server says it serves; without a server, what it would start with."""
    forwards = endpoint.state / "forwards"
    with contextlib.suppress(UserError, Refused):
        return load_forward(forwards, str(version(endpoint.state, CHECK_S)["forward"]))
    release = shipped_release(endpoint.state / "releases", read_approvers(endpoint.state / "approvers.json"))
    if release is not None and release.launch == endpoint.launch:
        with contextlib.suppress(Refused):
            return load_forward(forwards, release.forward)
    folder = first_forward(endpoint)
    try:
        return Forward.load(folder)
    except (CandidateError, OSError, ValueError) as error:
        raise UserError(str(folder), f"is not a forward ({error})", "mend the field forward") from None


def incumbent_folder(run: Run, endpoint: Endpoint) -> Path:
    """The night's incumbent, fixed when the night first asks: a ship in between must not change what it is compared with."""
    fixed = run.folder / "incumbent.json"
    if not fixed.exists():
        forward = serving_forward(endpoint)
        forward.save(endpoint.state / "forwards")
        write_atomic(fixed, json.dumps({"forward": forward.id}))
    remedy = "remove it, unless trials of this run are to be kept: what serves now becomes the incumbent"
    return endpoint.state / "forwards" / read_json(fixed, lambda raw: str(raw["forward"]), remedy)
