"""Nodes `profile` and `workload`: the distributions of the night's requests, and the requests to replay."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tideforge.data.files import canonical_json, sha256_bytes
from tideforge.data.profile import keep_between, make_profile, open_requests, write_histograms
from tideforge.data.profile_records import Profile
from tideforge.data.sample import sample_workload
from tideforge.data.workload import Workload
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Manifest, Run

EARLIER, LEAST_LATER = 2 / 3, 300  # share of the requests that the search part knows; requests that a profile needs
HELD_OUT_A_USER = 2  # 8 pairs of blocks of them have to fit into the budget of verification


def profile(run: Run, endpoint: Endpoint) -> Manifest:
    """Outputs: profile (JSON; its SHA-256 is the profile's id), histograms (Parquet)."""
    started = time.time()
    ingested = run.need("ingest")
    inputs = {"requests": ingested.outputs["requests"].sha256}
    if manifest := run.done("profile", inputs):
        return manifest
    db = open_requests(run.path(ingested, "requests"))
    made = make_profile(db)
    with tempfile.TemporaryDirectory(dir=run.folder, prefix=".profile-") as scratch:
        histograms = Path(scratch) / "histograms.parquet"
        write_histograms(db, histograms)
        outputs = {
            "profile": run.write_bytes("profile", ".json", made.to_json()),
            "histograms": run.add_file("histograms", histograms),
        }
    return run.finish("profile", inputs, outputs, {"profile": made.sha256, "requests": made.requests}, started)


def read_profile(run: Run) -> Profile:
    """The profile of a run that has made one."""
    return Profile.read(run.path(run.need("profile"), "profile"))


def workload(run: Run, endpoint: Endpoint, corpus_ids: Sequence[int]) -> Manifest:
    """Output: workload (JSON of data.workload.Workload). `corpus_ids`: tokens of the text that prompts are cut from."""
    started = time.time()
    inputs = workload_inputs(run, endpoint, corpus_ids)
    if manifest := run.done("workload", inputs):
        return manifest
    made = sampled(run, endpoint, corpus_ids)
    outputs = {"workload": run.write_bytes("workload", ".json", made.to_json().encode())}
    return run.finish("workload", inputs, outputs, {"notes": list(made.notes)}, started)


def workload_inputs(run: Run, endpoint: Endpoint, corpus_ids: Sequence[int]) -> dict[str, str]:
    """What a workload's manifest names: profile, what the endpoint asks for, text."""
    return {
        "profile": run.need("profile").outputs["profile"].sha256,
        "spec": sha256_bytes(canonical_json(endpoint.workload.model_dump(mode="json"))),
        "corpus": sha256_bytes(canonical_json([int(token) for token in corpus_ids])),
    }


def sampled(run: Run, endpoint: Endpoint, corpus_ids: Sequence[int]) -> Workload:
    """The workload as the endpoint asks for it; the same from the same inputs."""
    spec = endpoint.workload
    earlier, later = halves(run)
    return sample_workload(
        earlier,
        later=later,
        users=spec.users,
        prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
        search_output_tokens=spec.search_output_tokens,
        corpus_ids=corpus_ids,
        seed=spec.seed,
        held_out_requests=HELD_OUT_A_USER * spec.users,
    )


def halves(run: Run) -> tuple[Profile, Profile | None]:
    """What the search part of a workload is drawn from, and the traffic after it, which the held-out part is drawn from: so no
    request is behind both. Of few requests both are drawn from all."""
    whole = read_profile(run)
    if whole.requests * (1 - EARLIER) < LEAST_LATER:
        return whole, None
    made = []
    for first, last in ((0.0, EARLIER), (EARLIER, 1.0)):
        db = open_requests(run.path(run.need("ingest"), "requests"))
        keep_between(db, first, last)
        made.append(make_profile(db))
    return made[0], made[1]


def read_workload(run: Run) -> Workload:
    return Workload.read(run.path(run.need("workload"), "workload"))
