"""Node `ingest`: traffic logs in, checked requests and quarantine out."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tideforge.data.files import sha256_file, sweep
from tideforge.data.logs import find_logs
from tideforge.data.mapping import chosen_formats
from tideforge.data.readers import Reading, read_logs
from tideforge.data.staging import Location
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Manifest, Output, Run

LEFT = (".ingest*", ".requests-*.tmp", ".quarantine-*.tmp")  # what a killed ingest may leave in the run's folder


def log_files(endpoint: Endpoint) -> list[Location]:
    """What `traffic.logs` names, and the server's own log in the state folder."""
    own = endpoint.state / "traffic"
    patterns = list(endpoint.traffic.logs)
    if any(own.glob("*.parquet")):
        patterns.append(str(own / "*.parquet"))
    if not patterns:
        raise UserError("traffic.logs", "names no log and the server has written none", "name a traffic log there")
    return find_logs(patterns)


def read_traffic(endpoint: Endpoint) -> Reading:
    return read_logs(log_files(endpoint), chosen_formats(endpoint.traffic.formats))


def state_of(location: Location) -> str:
    """A value that changes when the file does: the hash of a local one, size and time of one behind s3://."""
    return sha256_file(location) if isinstance(location, Path) else location.state


def ingest(run: Run, endpoint: Endpoint) -> Manifest:
    """Outputs: requests (Parquet, no text), quarantine (Parquet), report (JSON).

    A night works on the log as it was when ingest ran: files that appeared since do not make it run again, files that
    changed or went do, and so does another mapping. Killed at any moment it leaves the manifest as it was or the new one.
    """
    started = time.time()
    locations, formats = log_files(endpoint), chosen_formats(endpoint.traffic.formats)
    inputs = {str(location): state_of(location) for location in locations}
    if formats:
        inputs["formats"] = " ".join(each.sha256 for each in formats)
    before = run.manifest("ingest")
    same = before and before.inputs.get("formats") == inputs.get("formats") and before.inputs.items() <= inputs.items()
    if before and same and run.done("ingest", before.inputs):
        return before
    reading = read_logs(locations, formats)
    report = reading.report
    outputs = write_reading(run, reading)
    extra = {
        "rows": report.rows, "kept": report.kept, "duplicates": report.duplicates, "quarantined": report.quarantined,
    }  # fmt: skip
    return run.finish("ingest", inputs, outputs, extra, started)


def write_reading(run: Run, reading: Reading) -> dict[str, Output]:
    with scratch_in(run.folder) as scratch:
        requests, quarantine = scratch / "requests.parquet", scratch / "quarantine.parquet"
        reading.write_requests(requests)
        reading.write_quarantine(quarantine)
        return {
            "requests": run.add_file("requests", requests),
            "quarantine": run.add_file("quarantine", quarantine),
            "report": run.write_json("ingest-report", reading.report.model_dump(mode="json")),
        }


@contextlib.contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """A folder that vanishes with the block; what killed processes left there vanishes first."""
    for pattern in LEFT:
        sweep(folder, pattern)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".ingest.{os.getpid()}-") as scratch:
        yield Path(scratch)
