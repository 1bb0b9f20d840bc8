"""Node `track`: the night in MLflow. The only file that imports mlflow.

One parent run a night, a child run a candidate, the forward of the finalist as a version of the model that is named
like the endpoint, with aliases: `challenger` is the version that a night proposes, `champion` the one that serves. All
of it is recomputed from the run folder, so a night that MLflow missed is only marked in `<run>/spool/` and tracked
later (`sync`). Doing it twice changes nothing: runs and versions are found again by their tags.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tideforge.data.files import read_json
from tideforge.engine.forward import Forward
from tideforge.engine.outcome import Trial
from tideforge.errors import MissingExtra
from tideforge.tasks import evidence
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.facts import Night, forward_folder
from tideforge.tasks.store import Manifest, Run

log = logging.getLogger(__name__)
CHAMPION, CHALLENGER = "champion", "challenger"
RUN, TRIAL, FORWARD = "tideforge.run", "tideforge.trial", "tideforge.forward"


def track(run: Run, endpoint: Endpoint) -> Manifest:
    """Writes `track.json` with MLflow's ids, or with `spooled` when MLflow cannot be reached now."""
    night = Night.read(run)
    inputs = night.hashes()
    if (done := run.done("track", inputs)) and not (run.folder / "spool" / "track.json").exists():
        return done
    started = time.time()
    try:
        extra = _write(run, endpoint, night)
        (run.folder / "spool" / "track.json").unlink(missing_ok=True)
    except Exception as error:
        if not _is_outage(error):
            raise
        spool(run.folder, "track", "")
        log.warning("MLflow at %s is away (%s): spooled", tracking_uri(endpoint), type(error).__name__)
        extra = {"spooled": True, "problem": str(error).splitlines()[0][:200]}
    return run.finish("track", inputs, {}, extra, started)


def moved(endpoint: Endpoint, how: Literal["ship", "rollback"], forward: str, run: Run | None = None) -> bool:
    """Moves `champion` to the version that holds `forward`.

    False when that was spooled: MLflow is away, or the night that made the version is itself not tracked yet.
    """
    try:
        if _move(endpoint, how, forward):
            return True
    except Exception as error:
        if not _is_outage(error):
            raise
    spool(run.folder if run else endpoint.state, how, forward)
    return False


def spool(folder: Path, kind: str, forward: str) -> Path:
    path = folder / "spool" / f"{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"kind": kind, "forward": forward, "time": time.time()}))
    temporary.rename(path)
    return path


def sync(endpoint: Endpoint) -> tuple[int, int]:
    """Retries what was spooled, oldest first; returns (done, still waiting)."""
    folders = [*sorted((endpoint.state / "runs").glob("*/spool")), endpoint.state / "spool"]
    paths = [path for folder in folders for path in folder.glob("*.json")]
    done = 0
    for path, entry in sorted(((path, _spooled(path)) for path in paths), key=lambda one: one[1]["time"]):
        if entry["kind"] == "track":
            done += not track(Run(path.parent.parent), endpoint).extra.get("spooled", False)
        else:
            path.unlink()  # `moved` writes it again when MLflow is still away
            done += moved(endpoint, entry["kind"], entry["forward"], _run_of(path, endpoint))
    return done, len(paths) - done


def _spooled(path: Path) -> dict[str, Any]:
    def entry(raw: dict[str, Any]) -> dict[str, Any]:
        return {"kind": str(raw["kind"]), "forward": raw["forward"], "time": float(raw["time"])}

    return read_json(path, entry, "remove it; `tideforge node track --run RUN` logs its night again")


def _run_of(path: Path, endpoint: Endpoint) -> Run | None:
    folder = path.parent.parent
    return None if folder == endpoint.state else Run(folder)


def tracking_uri(endpoint: Endpoint) -> str:
    return endpoint.tracking_uri or f"sqlite:///{endpoint.state.resolve() / 'mlflow.db'}"


def client(endpoint: Endpoint) -> Any:
    """An MlflowClient. Its own retries are cut short: an outage is spooled, not waited for."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise MissingExtra("mlflow", "flow") from error
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store").setLevel(logging.WARNING)
    endpoint.state.mkdir(parents=True, exist_ok=True)
    uri = tracking_uri(endpoint)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _is_outage(error: Exception) -> bool:
    """A server that is away or failing; wrong requests are bugs and stay errors."""
    import requests
    from mlflow.exceptions import MlflowException

    if isinstance(error, requests.exceptions.RequestException):
        return True
    if not isinstance(error, MlflowException):
        return False
    return "failed with exception" in str(error) or "Max retries" in str(error) or error.get_http_status_code() >= 502


def _write(run: Run, endpoint: Endpoint, night: Night) -> dict[str, Any]:
    mlflow = client(endpoint)
    experiment = _experiment(mlflow, endpoint)
    parent = _run(mlflow, experiment, {RUN: run.id, TRIAL: "night"}, f"night {run.id}")
    _log_parent(mlflow, parent, run, endpoint, night)
    children = {
        trial.id: _log_trial(mlflow, experiment, parent, run, night, trial) for trial in night.trials if trial.done
    }
    versions = _register(mlflow, parent, run, endpoint, night)
    mlflow.set_terminated(parent, "FINISHED")
    return {
        "tracking_uri": tracking_uri(endpoint),
        "experiment": experiment,
        "parent": parent,
        "children": children,
        **versions,
    }


def _experiment(mlflow: Any, endpoint: Endpoint) -> str:
    known = mlflow.get_experiment_by_name(endpoint.name)
    if known:
        return str(known.experiment_id)
    remote = tracking_uri(endpoint).startswith("http")
    location = None if remote else (endpoint.state.resolve() / "mlartifacts").as_uri()
    return str(mlflow.create_experiment(endpoint.name, artifact_location=location))


def _run(mlflow: Any, experiment: str, tags: Mapping[str, str], name: str) -> str:
    """The run with these tags, made when there is none. Values are hashes and ids: no quotes to escape."""
    query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = mlflow.search_runs([experiment], query, max_results=1)
    if found:
        return str(found[0].info.run_id)
    return str(mlflow.create_run(experiment, tags=dict(tags), run_name=name).info.run_id)


def _log(
    mlflow: Any, run_id: str, metrics: Mapping[str, float], params: Mapping[str, Any], tags: Mapping[str, str]
) -> None:
    """Step 0 and a fixed time: logging the same again overwrites instead of adding points."""
    from mlflow.entities import Metric, Param, RunTag

    mlflow.log_batch(
        run_id,
        [Metric(key, float(value), 0, 0) for key, value in metrics.items()],
        [Param(key, str(value)[:500]) for key, value in params.items()],
        [RunTag(key, value) for key, value in tags.items()],
    )


def _log_parent(mlflow: Any, parent: str, run: Run, endpoint: Endpoint, night: Night) -> None:
    params = {
        "endpoint": endpoint.name,
        "model": endpoint.model,
        "hardware": endpoint.hardware.name,
        "launch": endpoint.launch,
    }
    tags = {
        "reason": str(night.started.get("reason", "")),
        "finalist": night.finalist or "none",
        "incumbent": night.incumbent,
        "flags": "; ".join(evidence.flags(night.verdict))[:5000] or "none",
    }
    outcomes = {f"outcomes.{kind}": count for kind, count in night.outcomes.items()}
    figures = {} if night.score is None else _metrics(dataclasses.asdict(night.score))
    figures |= {f"gate_s.{gate['name']}": gate.get("seconds", 0.0) for gate in (night.verdict or {}).get("gates", [])}
    _log(
        mlflow,
        parent,
        {"candidates": len({trial.forward for trial in night.trials}), **outcomes, **figures},
        params,
        tags,
    )
    for path in night.artifacts():
        mlflow.log_artifact(parent, str(path), "night")


def _metrics(figures: Mapping[str, Any]) -> dict[str, float]:
    """Figures under the names that the comparison page shows."""
    names = {
        "candidate_tps": "output_tps",
        "incumbent_tps": "incumbent_output_tps",
        "tps_per_user_p50": "tps_per_user_median",
        "tps_per_user_p90": "tps_per_user_p90",
        "ttft_ms": "ttft_ms",
        "ratio": "ratio",
        "ci_low": "ci_low",
        "ci_high": "ci_high",
        "pairs": "pairs",
    }
    return {names[key]: float(value) for key, value in figures.items() if key in names and value is not None}


def _log_trial(mlflow: Any, experiment: str, parent: str, run: Run, night: Night, trial: Trial) -> str:
    tags = {RUN: run.id, TRIAL: trial.id}
    child = _run(mlflow, experiment, tags, f"{trial.submitter or 'candidate'} {trial.id}")
    figures = {} if trial.figures is None else _metrics(dataclasses.asdict(trial.figures))
    seconds = {"stage_s": trial.stage_s, "check_s": trial.check_s, "clock_s": trial.clock_s, "gates_s": trial.gates_s}
    params = {"tier": trial.tier, "submitter": trial.submitter, "forward": trial.forward}
    facts = {
        "outcome": str(trial.outcome),
        "message": trial.message[:500],
        "mlflow.parentRunId": parent,
        FORWARD: trial.forward,
    }
    _log(mlflow, child, {**seconds, **figures}, params, facts)
    _log_source(mlflow, child, run, night, trial.forward)
    mlflow.set_terminated(child, "FINISHED" if trial.figures else "FAILED")
    return child


def _log_source(mlflow: Any, run_id: str, run: Run, night: Night, forward: str) -> None:
    folder = forward_folder(run, forward)
    if folder is None:
        return
    mlflow.log_artifacts(run_id, str(folder), "forward")
    incumbent = forward_folder(run, night.incumbent)
    if incumbent is not None:
        mlflow.log_text(run_id, diff(Forward.load(incumbent), Forward.load(folder)), "incumbent.diff")


def diff(old: Forward, new: Forward) -> str:
    """Unified diff over all files of two forwards."""
    lines: list[str] = []
    for name in sorted({*old.files, *new.files}):
        before, after = old.files.get(name, "").splitlines(), new.files.get(name, "").splitlines()
        lines += difflib.unified_diff(before, after, f"incumbent/{name}", f"candidate/{name}", lineterm="")
    return "\n".join(lines) + "\n"


def _register(mlflow: Any, parent: str, run: Run, endpoint: Endpoint, night: Night) -> dict[str, Any]:
    """Versions of incumbent and finalist. Artifacts first, then `runs:/ID/...`: a server refuses file:// sources."""
    from mlflow.exceptions import MlflowException

    try:
        mlflow.get_registered_model(endpoint.name)
    except MlflowException:
        mlflow.create_registered_model(endpoint.name)
    versions: dict[str, Any] = {"model": endpoint.name}
    for role, forward in (("incumbent", night.served), ("finalist", night.finalist)):
        if forward and (version := _version(mlflow, parent, run, endpoint.name, role, forward)):
            versions[role] = version
    aliases = mlflow.get_registered_model(endpoint.name).aliases
    if CHAMPION not in aliases and "incumbent" in versions:
        mlflow.set_registered_model_alias(endpoint.name, CHAMPION, versions["incumbent"])
    if "finalist" in versions:
        mlflow.set_registered_model_alias(endpoint.name, CHALLENGER, versions["finalist"])
    return versions


def _version(mlflow: Any, parent: str, run: Run, model: str, role: str, forward: str) -> str | None:
    found = _find_version(mlflow, model, forward)
    if found:
        return found
    folder = forward_folder(run, forward)
    if folder is None:
        return None
    place = "forward" if role == "finalist" else "incumbent"
    mlflow.log_artifacts(parent, str(folder), place)
    made = mlflow.create_model_version(
        model,
        source=f"runs:/{parent}/{place}",
        run_id=parent,
        tags={FORWARD: forward, RUN: run.id},
        description=f"forward {forward}",
    )
    return str(made.version)


def _find_version(mlflow: Any, model: str, forward: str) -> str | None:
    versions = mlflow.search_model_versions(f"name = '{model}'")
    found = sorted(int(version.version) for version in versions if version.tags.get(FORWARD) == forward)
    return str(found[-1]) if found else None


def _move(endpoint: Endpoint, how: str, forward: str) -> bool:
    """False when no version holds `forward`."""
    mlflow = client(endpoint)
    version = _find_version(mlflow, endpoint.name, forward)
    if version is None:
        return False
    mlflow.set_registered_model_alias(endpoint.name, CHAMPION, version)
    mlflow.set_model_version_tag(endpoint.name, version, "tideforge.moved_by", how)
    aliases = mlflow.get_registered_model(endpoint.name).aliases
    if str(aliases.get(CHALLENGER, "")) == version:
        mlflow.delete_registered_model_alias(endpoint.name, CHALLENGER)
    return True
