"""Once an hour: has traffic moved away from what the endpoint was tuned for? Every look is recorded, drift or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from tideforge.tasks.endpoint import Endpoint

EVENT = "tideforge.drift.detected"


@task(cache_policy=NO_CACHE)
def look(endpoint: str, state: str | None) -> dict[str, Any]:
    """Reads rows newer than the last profile, compares, writes <state>/drift/<time>.json."""
    from tideforge.tasks.drift import look as compare

    loaded = Endpoint.load(Path(endpoint))
    return compare(loaded.model_copy(update={"state": Path(state)}) if state else loaded)


@task(cache_policy=NO_CACHE)
def announce(decision: dict[str, Any]) -> None:
    """The event that the automation in deployments/prefect.yaml waits for."""
    resource = {
        "prefect.resource.id": f"tideforge.endpoint.{decision['endpoint']}",
        "prefect.resource.name": decision["endpoint"],
    }
    emit_event(EVENT, resource, payload={name: decision[name] for name in ("reason", "record", "traffic")})


@flow(name="watch", persist_result=True, result_serializer="json")
def watch(endpoint: str, state: str | None = None) -> dict[str, Any]:
    decision = look(endpoint, state)
    if decision["recompile"]:
        announce(decision)
    return decision
