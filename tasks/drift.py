"""One look of the watch: rows that came in since the last profile, against that profile. Every look is written down."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import TYPE_CHECKING, Any

from tideforge.data.decide import Stakes, refusal
from tideforge.data.files import canonical_json, write_whole
from tideforge.data.stack_change import changed
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.ingest import read_traffic
from tideforge.tasks.night import runs_root
from tideforge.tasks.store import Manifest, Run
from tideforge.tasks.watching import decisions, expected_gain, stack, watch_hours

if TYPE_CHECKING:
    from tideforge.data.readers import Reading


def look(endpoint: Endpoint) -> dict[str, Any]:
    """Compares and writes `<state>/drift/<time>.json`; returns what it wrote.

    `drifted` says what the figures say: of the new rows against the profile, of the hourly watches where the log holds
    weeks of history, and of the stack. `recompile` also asks that the last drift-caused night is cooldown_hours ago and
    that a night is worth its cost; `refused` says why not.
    """
    run, manifest = last_profile(endpoint)
    before = decisions(endpoint.state)
    rows = read_traffic(endpoint)
    alarming = bool(before and before[-1]["drifted"] and before[-1]["against"] == run.id)
    watched = watch_hours(rows.db, manifest.finished, time.time(), alarming)
    since(rows, endpoint, manifest.finished)
    count = rows.db.execute("SELECT count(*) FROM requests").fetchall()[0][0]
    facts = compared(run, manifest, rows, count, endpoint)
    versions = stack()
    tuned = next((one["stack"] for one in before if one["against"] == run.id and "stack" in one), versions)
    changes = changed(tuned, versions)
    reasons = [*watched.reasons, *(f"stack: {line}" for line in changes)]
    if reasons:
        facts["reason"] = "; ".join([facts["reason"]] * facts["drifted"] + reasons)
        facts["drifted"] = True
    facts |= {"watches": dataclasses.asdict(watched), "stack": versions, "stack_changes": changes}
    return record(endpoint, run, rows, count, facts, before)


def compared(run: Run, manifest: Manifest, rows: Reading, count: int, endpoint: Endpoint) -> dict[str, Any]:
    """The new rows against the profile."""
    from tideforge.data.drift import detect
    from tideforge.data.profile import make_profile
    from tideforge.data.profile_records import Profile

    needed = endpoint.drift.min_requests
    if count < needed:
        return {"drifted": False, "reason": f"not judged: {count} new requests, below {needed}", "figures": {}}
    old = Profile.read(run.path(manifest, "profile"))
    return dataclasses.asdict(detect(old, make_profile(rows.db), endpoint.drift.threshold, needed))


def last_profile(endpoint: Endpoint) -> tuple[Run, Manifest]:
    """The newest run that has a profile. UserError when there is none: nothing was tuned for yet."""
    root = runs_root(endpoint)
    folders = sorted((path for path in root.iterdir() if path.is_dir()), reverse=True) if root.is_dir() else []
    for folder in folders:
        if (manifest := Run(folder).manifest("profile")) is not None:
            return Run(folder), manifest
    raise UserError(str(root), "holds no profile to compare with", "run `tideforge recompile` first")


def since(rows: Reading, endpoint: Endpoint, moment: float) -> None:
    """Leaves only the log's good rows that arrived later than `moment`, of the last window."""
    from tideforge.data.profile import keep_last

    rows.db.execute("DELETE FROM requests WHERE epoch_us(arrival) <= ?", [round(moment * 1e6)])
    keep_last(rows.db, endpoint.drift.window_hours)


def record(
    endpoint: Endpoint, run: Run, rows: Reading, count: int, facts: dict[str, Any], before: list[dict[str, Any]]
) -> dict[str, Any]:
    """Writes the decision, and beside it the rows that a night caused by it works on."""
    now = time.time()
    last = max((float(one["time"]) for one in before if one["recompile"]), default=None)
    gain, source = expected_gain(endpoint)
    cost = (endpoint.budget.search_s + endpoint.budget.verify_s) / 3600
    stakes = Stakes(gain, source, endpoint.drift.horizon_hours, cost)
    ago = None if last is None else (now - last) / 3600
    refused = refusal(facts["drifted"], stakes, ago, endpoint.drift.cooldown_hours)
    folder = endpoint.state / "drift"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y%m%d-%H%M%S-%f}.json"
    traffic = path.with_suffix(".parquet")
    kept = facts["drifted"] and count > 0  # a change of the stack may come without a request
    if kept:
        rows.write_requests(traffic)
    decision = {
        **facts,
        "traffic": str(traffic.resolve()) if kept else "",
        "time": now,
        "endpoint": endpoint.name,
        "against": run.id,
        "new_requests": count,
        "stakes": {**dataclasses.asdict(stakes), "worth_hours": stakes.worth_hours},
        "recompile": not refused,
        "refused": refused,
        "cooling_down": refused.startswith("cooling down"),
        "record": str(path),
    }
    write_whole(path, canonical_json(decision))
    return decision
