"""Node `ingest`: traffic logs in, checked requests and quarantine out."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tideforge.data.files import sha256_file
from tideforge.data.logs import find_logs
from tideforge.data.readers import Reading, read_logs
from tideforge.errors import UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Manifest, Output, Run


def log_files(endpoint: Endpoint) -> list[Path]:
    """What `traffic.logs` names, and the server's own log in the state folder."""
    own = endpoint.state / "traffic"
    patterns = list(endpoint.traffic.logs)
    if any(own.glob("*.parquet")):
        patterns.append(str(own / "*.parquet"))
    if not patterns:
        raise UserError("traffic.logs", "names no log and the server has written none", "name a traffic log there")
    return find_logs(patterns)


def ingest(run: Run, endpoint: Endpoint) -> Manifest:
    """Outputs: requests (Parquet, no text), quarantine (Parquet), report (JSON).

    A night works on the log as it was when ingest ran: files that appeared since do not make it run again, files that
    changed or went do.
    """
    started = time.time()
    paths = log_files(endpoint)
    inputs = {str(path): sha256_file(path) for path in paths}
    before = run.manifest("ingest")
    if before and before.inputs.items() <= inputs.items() and run.done("ingest", before.inputs):
        return before
    reading = read_logs(paths)
    report = reading.report
    outputs = write_reading(run, reading)
    extra = {
        "rows": report.rows, "kept": report.kept, "duplicates": report.duplicates, "quarantined": report.quarantined,
    }  # fmt: skip
    return run.finish("ingest", inputs, outputs, extra, started)


def write_reading(run: Run, reading: Reading) -> dict[str, Output]:
    with tempfile.TemporaryDirectory(dir=run.folder, prefix=".ingest-") as scratch:
        requests, quarantine = Path(scratch) / "requests.parquet", Path(scratch) / "quarantine.parquet"
        reading.write_requests(requests)
        reading.write_quarantine(quarantine)
        return {
            "requests": run.add_file("requests", requests),
            "quarantine": run.add_file("quarantine", quarantine),
            "report": run.write_json("ingest-report", reading.report.model_dump(mode="json")),
        }
