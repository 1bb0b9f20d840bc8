"""A night as it lies on disk: two finished candidates of which one passed, a verdict with pairs, forwards in the archive.

`decided` and `live` add a signed decision and what a live server answered.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideforge.data.files import sha256_file
from tideforge.engine import release as rel
from tideforge.engine.events import log_event
from tideforge.engine.forward import Forward
from tideforge.engine.keys import add_approver, crypto, public_bytes
from tideforge.engine.outcome import Figures, Outcome, Trial
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import open_night
from tideforge.tasks.store import Run
from tideforge.tasks.verify.plan import required

INCUMBENT = Forward({"forward.py": "def build(ctx):\n    return None\n"})
WINNER = Forward({"forward.py": "def build(ctx):\n    return ctx\n"})
BROKEN = Forward({"forward.py": "def build(ctx):\n    raise ValueError\n"})
PAIRS = [[100.0, 130.0], [110.0, 140.0], [90.0, 120.0]]
NOISE = (0.0001, -0.0001)
BASELINE = {
    "ratio": 9.0, "ratios": [1.05, 1.01, 1.08], "raw_tps": 9.0, "floor_tps": 9.0,
    "lanes_tps": {"raw": 20.0, "linear layers alone": 25.0},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Made:
    run: Run
    endpoint: Endpoint


def endpoint_in(folder: Path, uri: str | None = None) -> Endpoint:
    raw = {"name": "tiny", "model": "m", "launch": "tideforge serve --model m", "hardware": {"name": "cpu"}}
    return Endpoint.model_validate({**raw, "state": str(folder), "tracking_uri": uri})


def make_night(endpoint: Endpoint, run_id: str = "n1") -> Run:
    for forward in (INCUMBENT, WINNER, BROKEN):
        forward.save(endpoint.state / "forwards")
    run = open_night(endpoint, run_id, "test", "")
    figures = Figures(1.3, 1.2, 1.4, 8, 130.0, 100.0, 12.0, 9.0, 8.0)
    trials = [
        Trial("000000-a", WINNER.id, "slow", "offline-1", 10.0, Outcome.PASSED, "", figures, finished_at=20.0),
        Trial("000001-b", BROKEN.id, "slow", "offline-2", 11.0, Outcome.BUILD_ERROR, "ValueError", finished_at=25.0),
    ]
    write_trials(run, trials)
    (run.folder / "tuned.json").write_text(json.dumps({"served": INCUMBENT.id, "incumbent": INCUMBENT.id}))
    (run.folder / "noise.json").write_text(json.dumps({"log_ratios": list(NOISE)}))
    for event in ("service_start", "worker_start", "worker_start"):
        log_event(run.folder, event)
    outputs = {
        "trials": run.write_json("trials", [json.loads(trial.to_json()) for trial in trials]),
        "board": run.write_bytes("board", ".jsonl", b'{"post": 1}\n'),
    }
    extra = {"finalist": WINNER.id, "incumbent": INCUMBENT.id, "served": INCUMBENT.id, "noise": list(NOISE)}
    tuned = {"tuned_sha256": sha256_file(run.folder / "tuned.json")}
    run.finish("search", {}, outputs, {**extra, **tuned}, started=9.0)
    verified = {
        "verdict": run.write_json("verdict", verdict()),
        "baseline": run.write_json("baseline", BASELINE),
    }
    run.finish("verify", {}, verified, {"passed": True})
    return run


def write_trials(run: Run, trials: list[Trial]) -> None:
    for trial in trials:
        folder = run.folder / "trials" / trial.id
        folder.mkdir(parents=True)
        waiting = dataclasses.replace(trial, outcome=None, figures=None, message="", finished_at=None)
        (folder / "submission.json").write_text(waiting.to_json())
        (folder / "result.json").write_text(trial.to_json())


def verdict(passed: bool = True) -> dict[str, Any]:
    """Its ratio and interval are not those of its pairs: nobody may believe them."""
    gates: list[dict[str, Any]] = [
        {"name": name, "passed": passed or name != "canary_pages"} for name in sorted(required())
    ]
    figures = {"ratio": 9.0, "ci_low": 8.0, "ci_high": 10.0, "ttft_ms": 11.0, "tps_per_user_p50": 9.0}
    whole = {**figures, "tps_per_user_p90": 8.0, "pairs": PAIRS, "gates": gates}
    return {**whole, "forward": WINNER.id, "incumbent": INCUMBENT.id, "passed": passed}


def decided(run: Run, decision: rel.Decision = rel.Decision.APPROVE, who: str = "ada") -> rel.Release:
    """release.json and approval.json, signed by an approver whom the state folder trusts."""
    state = run.folder.parent.parent
    key = crypto()[0].Ed25519PrivateKey.generate()
    add_approver(state / "approvers.json", who, public_bytes(key))
    release = rel.Release(
        run=run.id, endpoint="tiny", forward=WINNER.id, incumbent=INCUMBENT.id, layout="unchanged", weights_sha256="w",
        launch="l", environment=(), verdict_sha256=run.need("verify").outputs["verdict"].sha256, gain=rel.Gain(),
        created_at=1, expires_at=2, previous="", go_back="",
    )  # fmt: skip
    run.finish("release", {}, {"record": run.write_json("release", release.to_record())}, {"waits": True})
    code = rel.sign(key, release, decision, who)
    said = {"decision": str(decision), "who": "as the form claims", "why": "", "code": code}
    run.finish("approval", {}, {"decision": run.write_json("approval", said)}, {"decision": str(decision), "who": who})
    return release


def live(run: Run, release: rel.Release) -> None:
    """What the server answered and kept when this release was shipped: one stream of the flip failed."""
    state = run.folder.parent.parent
    code = run.read_json(run.need("approval"), "decision")["code"]
    (state / "releases").mkdir()
    kept = {"record": release.to_record(), "code": code}
    (state / "releases" / f"0001-{release.forward[:12]}.json").write_text(json.dumps(kept))
    blocks = [
        {"forward": name, "tokens": 100, "seconds": seconds, "failed": failed}
        for name, seconds, failed in (
            ("incumbent", 2.0, 0),
            ("forward", 1.5, 1),
            ("forward", 1.7, 0),
            ("incumbent", 2.0, 0),
        )
    ]
    flip = {"answer": {"status": 200, "forward": release.forward}, "streams": [{"problem": ""}, {"problem": "cut"}]}
    output = run.write_json("live", {"blocks": blocks, "flips": [flip], "wrong": []})
    run.finish("ship", {}, {"live": output}, {"shipped": release.forward, "problem": "", "failed_requests": 2})


@pytest.fixture
def made(tmp_path: Path) -> Made:
    endpoint = endpoint_in(tmp_path / "s")
    return Made(make_night(endpoint), endpoint)


@pytest.fixture
def nights() -> SimpleNamespace:
    """The makers above, for tests that want an endpoint of their own."""
    return SimpleNamespace(
        endpoint_in=endpoint_in, make_night=make_night, decided=decided, live=live, WINNER=WINNER, INCUMBENT=INCUMBENT
    )
