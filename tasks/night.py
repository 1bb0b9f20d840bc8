"""Opens a night: the run folder, what it was started for, and whether what it needs can be reached."""

from __future__ import annotations

import datetime
import json
import secrets
import time
from pathlib import Path

from tideforge.data.files import sha256_bytes
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Run, checked


def runs_root(endpoint: Endpoint) -> Path:
    return endpoint.state / "runs"


def new_run_id() -> str:
    """Sorts by time; the tail keeps two nights of one second apart."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def open_night(endpoint: Endpoint, run_id: str | None, reason: str, flow_run: str = "") -> Run:
    """The run `run_id`, made when it is new. Without an id: the run that this flow run began, else a new one.

    `run.json` keeps name, reason, start and the id of the flow run that works on it. A resumed night keeps all but the
    last, which an approval needs to find the flow run that waits.
    """
    root = runs_root(endpoint)
    if run_id is None:
        run_id = _begun_by(root, flow_run) or new_run_id()
    run = Run(root / checked(run_id)) if (root / checked(run_id)).is_dir() else Run.create(root, run_id)
    known = run.manifest("run")
    if known is not None and flow_run and known.extra.get("flow_run") != flow_run:
        run.finish("run", known.inputs, known.outputs, {**known.extra, "flow_run": flow_run}, known.started)
    if known is None:
        text = json.dumps(endpoint.model_dump(mode="json"), sort_keys=True)
        output = run.write_json("endpoint", endpoint.model_dump(mode="json"))
        facts = {"endpoint": endpoint.name, "reason": reason, "started": time.time(), "flow_run": flow_run}
        run.finish("run", {"endpoint": sha256_bytes(text.encode())}, {"endpoint": output}, facts)
    return run


def _begun_by(root: Path, flow_run: str) -> str | None:
    if not flow_run or not root.is_dir():
        return None
    for folder in root.iterdir():
        if folder.is_dir() and (manifest := Run(folder).manifest("run")) and manifest.extra.get("flow_run") == flow_run:
            return folder.name
    return None


def find_run(run_id: str, endpoint: Endpoint | None = None) -> Run:
    """A run by id or by folder. Without an endpoint every runs/ folder under .tideforge/ is looked through."""
    if endpoint is not None:
        return Run.open(runs_root(endpoint), run_id)
    if (Path(run_id) / "run.json").is_file():
        return Run(Path(run_id))
    hits = [path.parent for path in Path(".tideforge").glob(f"**/runs/{run_id}/run.json")] if "/" not in run_id else []
    if len(hits) != 1:
        problem = "no such run under .tideforge/" if not hits else f"is in {len(hits)} state folders"
        raise UserError(run_id, problem, "give --endpoint FILE, or the path of the run folder")
    return Run(hits[0])


def stored_endpoint(run: Run) -> Endpoint:
    """The endpoint as it was when the run began."""
    return Endpoint.model_validate(run.read_json(run.need("run"), "endpoint"))


def check_prefect(api_url: str) -> None:
    """Raises UserError when no Prefect server answers at `api_url` (it ends in /api)."""
    import httpx

    try:
        if httpx.get(f"{api_url}/health", timeout=10).status_code == 200:
            return
        problem = "is not a Prefect server"
    except httpx.HTTPError as error:
        problem = f"does not answer ({type(error).__name__})"
    raise UserError(f"Prefect at {api_url}", problem, "run `tideforge up`, or mend PREFECT_API_URL, or use --local")


def check_mlflow(uri: str) -> None:
    """Raises UserError when a tracking server that the endpoint names does not answer. Of databases nothing is asked."""
    import httpx

    if not uri.startswith(("http://", "https://")):
        return
    try:
        if httpx.get(f"{uri.rstrip('/')}/health", timeout=10).status_code == 200:
            return
        problem = "is not an MLflow server"
    except httpx.HTTPError as error:
        problem = f"does not answer ({type(error).__name__})"
    raise UserError(f"MLflow at {uri}", problem, "start it, or mend tracking_uri in the endpoint file")
