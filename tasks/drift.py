"""One look of the watch: rows that came in since the last profile, against that profile. Every look is written down."""

from __future__ import annotations

import dataclasses
import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tideforge.data.files import canonical_json, read_json, write_whole
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import runs_root
from tideforge.tasks.store import Manifest, Run

if TYPE_CHECKING:
    from tideforge.data.readers import Reading


def look(endpoint: Endpoint) -> dict[str, Any]:
    """Compares and writes `<state>/drift/<time>.json`; returns what it wrote.

    `drifted` says what the figures say; `recompile` also asks that the last drift-caused night is cooldown_hours ago.
    """
    from tideforge.data.drift import detect
    from tideforge.data.profile import make_profile
    from tideforge.data.profile_records import Profile

    run, manifest = last_profile(endpoint)
    old = Profile.read(run.path(manifest, "profile"))
    rows = rows_since(endpoint, manifest.finished)
    count = rows.db.execute("SELECT count(*) FROM requests").fetchall()[0][0]
    needed = endpoint.drift.min_requests
    if count < needed:
        facts = {"drifted": False, "reason": f"not judged: {count} new requests, below {needed}", "figures": {}}
    else:
        facts = dataclasses.asdict(detect(old, make_profile(rows.db), endpoint.drift.threshold, needed))
    return record(endpoint, run, rows, count, facts)


def last_profile(endpoint: Endpoint) -> tuple[Run, Manifest]:
    """The newest run that has a profile. UserError when there is none: nothing was tuned for yet."""
    root = runs_root(endpoint)
    folders = sorted((path for path in root.iterdir() if path.is_dir()), reverse=True) if root.is_dir() else []
    for folder in folders:
        if (manifest := Run(folder).manifest("profile")) is not None:
            return Run(folder), manifest
    raise UserError(str(root), "holds no profile to compare with", "run `tideforge recompile` first")


def rows_since(endpoint: Endpoint, since: float) -> Reading:
    """The log's good rows that arrived later than `since`, of the last window."""
    from tideforge.data.profile import keep_last
    from tideforge.tasks.ingest import read_traffic

    reading = read_traffic(endpoint)
    reading.db.execute("DELETE FROM requests WHERE epoch_us(arrival) <= ?", [round(since * 1e6)])
    keep_last(reading.db, endpoint.drift.window_hours)
    return reading


def record(endpoint: Endpoint, run: Run, rows: Reading, count: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes the decision, and beside it the rows that a night caused by it works on."""
    now = time.time()
    last = last_recompile(endpoint)
    cooling = facts["drifted"] and last is not None and now - last < endpoint.drift.cooldown_hours * 3600
    folder = endpoint.state / "drift"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y%m%d-%H%M%S-%f}.json"
    traffic = path.with_suffix(".parquet")
    if facts["drifted"]:
        rows.write_requests(traffic)
    decision = {
        **facts,
        "traffic": str(traffic.resolve()) if facts["drifted"] else "",
        "time": now,
        "endpoint": endpoint.name,
        "against": run.id,
        "new_requests": count,
        "recompile": bool(facts["drifted"] and not cooling),
        "cooling_down": bool(cooling),
        "record": str(path),
    }
    write_whole(path, canonical_json(decision))
    return decision


def last_recompile(endpoint: Endpoint) -> float | None:
    """When a look last asked for a night; seconds since the epoch."""
    folder: Path = endpoint.state / "drift"
    paths = folder.glob("*.json") if folder.is_dir() else ()
    looks = [read_json(path, lambda raw: (float(raw["time"]), bool(raw["recompile"])), "remove it") for path in paths]
    return max((time for time, asked in looks if asked), default=None)
