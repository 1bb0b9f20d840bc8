"""The node: one finalist, chosen on the search part, against held-out requests in freshly started workers.

Gates and timed blocks run in random order in the same workers, but for the pairs beyond those that must be and the gates that
look back, which come last. A candidate can still tell them apart by their batch sizes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.data.workload import Workload
from tideforge.engine.compare import Bounds
from tideforge.engine.events import log_event
from tideforge.engine.forward import Forward
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.machine import floor_figures, settings_for
from tideforge.tasks.objective import measured
from tideforge.tasks.store import Manifest, Run
from tideforge.tasks.verify.examine import examine
from tideforge.tasks.verify.plainness import beside_transformers
from tideforge.tasks.verify.plan import Plan
from tideforge.tasks.verify.verdict import reason


def verify(run: Run, endpoint: Endpoint) -> Manifest:
    """verify.json: the verdict on the search's finalist, or that there is none."""
    search, plan = run.need("search"), Plan.of(endpoint.budget)
    inputs = {
        "finalist": str(search.extra["finalist"]),
        "incumbent": str(search.extra["incumbent"]),
        "workload": run.need("workload").outputs["workload"].sha256,
        "plan": f"{plan.pairs} pairs, at least {plan.least}, in {plan.seconds:g} s",
        "objective": repr(measured(endpoint)),
    }
    if (done := run.done("verify", inputs)) is not None:
        return done
    started = time.time()
    if search.extra["finalist"] is None:
        extra = {"passed": False, "reason": "no candidate was faster than the incumbent beyond doubt", "forward": None}
        return run.finish("verify", inputs, {}, extra, started=started)
    forwards = endpoint.state / "forwards"
    candidate = Forward.load(forwards / inputs["finalist"])
    if candidate.id != inputs["finalist"]:
        raise UserError(str(forwards / inputs["finalist"]), "its files do not hash to its name", "run the search again")
    settings = settings_for(endpoint)
    verdict = examine(
        settings, run.folder, Forward.load(forwards / inputs["incumbent"]), candidate,
        Workload.read(run.path(run.need("workload"), "workload")), bounds_from(search.extra["bounds"]),
        plan, lambda line: log_event(run.folder, "verify", line=line), noise=search.extra["noise"],
        objective=measured(endpoint), floor=floor_figures(endpoint), protected=archive(run),
    )  # fmt: skip
    log_event(run.folder, "verify", line="the incumbent's one-user decode beside transformers")
    plain = beside_transformers(settings, (forwards / str(search.extra["served"])).resolve())
    outputs = {"verdict": run.write_json("verdict", verdict.to_dict()), "baseline": run.write_json("baseline", plain)}
    extra = {
        "passed": verdict.passed, "forward": verdict.forward, "reason": reason(verdict), "flags": list(verdict.flags),
        "incumbent_vs_transformers": plain.get("ratio"),
        "linear_floor_ms": 1e3 / plain["floor_tps"] if "floor_tps" in plain else None,
        "incumbent_decode_ms": 1e3 / plain["raw_tps"] if "raw_tps" in plain else None,
    }  # fmt: skip
    return run.finish("verify", inputs, outputs, extra, started=started)


def archive(run: Run) -> tuple[Path, ...]:
    """What the search left: its trials and forwards, and every node's manifest."""
    folders = [path for name in ("trials", "forwards") if (path := run.folder / name).is_dir()]
    return (*folders, *sorted(run.folder.glob("*.json")))


def bounds_from(raw: Mapping[str, Any]) -> Bounds:
    """Bounds as the search derived and stored them."""
    return Bounds(**{**raw, "key": tuple(raw["key"]), "value": tuple(raw["value"])})
