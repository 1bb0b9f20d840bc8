"""The demo's steps: a fresh state folder, servers, a little traffic, a night through the deployment, an approval, a report.

With `approve` the approver is a key that lives in this process alone and is called `unattended demo`: the release says
so for good. Otherwise a person signs: the key lies beside the state folder, encrypted with a passphrase shown once.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tideforge.engine.keys import add_approver, create_key, crypto, public_bytes
from tideforge.engine.release import Decision, sign
from tideforge.errors import TideforgeError, UserError
from tideforge.flows import follow
from tideforge.tasks import stack
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.night import new_run_id
from tideforge.tasks.store import Run

WHO = "unattended demo"
FAST_BUDGET = {"search_s": 60.0, "held_out_pairs": 8}
QUESTIONS = (
    "Why is the sky blue?",
    "Name three uses of copper.",
    "Explain tides to a child.",
    "What is a prime number?",
)
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Approver:
    """`key` signs here and now; without it a person signs with the file at `path`."""

    name: str
    key: Any = None
    path: Path | None = None


def fresh_state(endpoint: Endpoint, say: Say) -> None:
    """An older demo is stopped and moved aside, never deleted."""
    state = endpoint.state
    if not state.exists():
        return
    if ended := stack.down(state):
        say(f"stopped the older demo: {', '.join(ended)}")
    aside = state.with_name(f"{state.name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}")
    os.rename(state, aside)
    say(f"moved the older demo to {aside}")


def endpoint_for(file: Path, fast: bool) -> tuple[Path, Endpoint]:
    """The endpoint as given, or with short budgets in a file of its own in the state folder."""
    endpoint = Endpoint.load(file)
    if not fast:
        return file, endpoint
    short = endpoint.model_copy(update={"budget": endpoint.budget.model_copy(update=FAST_BUDGET)})
    endpoint.state.mkdir(parents=True, exist_ok=True)
    path = endpoint.state / f"{file.stem}-fast.yaml"
    path.write_text(yaml.safe_dump(short.model_dump(mode="json")))
    return path, short


def make_approver(endpoint: Endpoint, unattended: bool, say: Say) -> Approver:
    """Before the server starts: it reads the public keys once."""
    trusted = endpoint.state / "approvers.json"
    if unattended:
        ed25519, _, _ = crypto()
        key = ed25519.Ed25519PrivateKey.generate()
        add_approver(trusted, WHO, public_bytes(key))
        return Approver(WHO, key)
    path = endpoint.state.with_name(f"{endpoint.state.name}-approver-{secrets.token_hex(2)}.pem")
    passphrase = secrets.token_urlsafe(9)
    add_approver(trusted, "demo", public_bytes(create_key(path, passphrase)))
    say(f"approver's key: {path}   passphrase (shown once): {passphrase}")
    return Approver("demo", path=path)


def warm_up(server: str) -> int:
    """A little real traffic, so that the server's own log has rows; the number of good answers."""
    model = httpx.get(f"{server}/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"]
    good = 0
    for question in QUESTIONS:
        chat = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 24}
        plain = {"model": model, "prompt": question, "max_tokens": 24, "temperature": 0}
        for path, body in (("chat/completions", chat), ("completions", plain)):
            good += httpx.post(f"{server}/v1/{path}", json=body, timeout=120).raise_for_status().status_code == 200
    return good


def night(servers: stack.Stack, endpoint: Endpoint, approver: Approver, say: Say) -> Run:
    """One night through the deployment, until it has ended."""
    api, run_id = servers.prefect_api, new_run_id()
    parameters = {"endpoint": servers.endpoint, "run": run_id, "reason": "demo", "approve": "form"}
    flow_run = follow.start(api, follow.NIGHTLY, parameters)
    say(f"run {run_id}: {follow.link(servers.prefect, flow_run)}")
    until = (*follow.FINAL, "PAUSED")
    tail = follow.Tail(endpoint)
    state = follow.follow(api, flow_run, endpoint, say, until, tail=tail)
    run = Run(endpoint.state / "runs" / run_id)
    if state["type"] == "PAUSED":
        decide(servers, endpoint, run, flow_run, approver, say)
        state = follow.follow(api, flow_run, endpoint, say, timeout_s=endpoint.approval_hours * 3600, tail=tail)
    if state["type"] != "COMPLETED":
        raise TideforgeError(
            f"run {run_id} {state['name'].lower()}: {state['message']}; logs: {endpoint.state / 'logs'}"
        )
    return run


def decide(servers: stack.Stack, endpoint: Endpoint, run: Run, flow_run: str, approver: Approver, say: Say) -> None:
    """Signs and fills in the form when the demo may, else says how a person does it."""
    link = follow.link(servers.prefect, flow_run)
    if approver.key is None:
        say(f"waiting for approval. Form: {link}")
        say(f"or here: TIDEFORGE_APPROVER_KEY={approver.path} tideforge approve {run.id}")
        return
    from tideforge.tasks.approve import read_release

    code = sign(approver.key, read_release(run), Decision.APPROVE, approver.name)
    form = {"approve": True, "code": code, "who": approver.name, "why": "nobody looked: APPROVE=yes"}
    follow.resume(servers.prefect_api, flow_run, form)
    say(f"signed as {approver.name!r}")


def append_shift(endpoint: Endpoint, requests: int = 600) -> Path:
    """Writes requests with other lengths into the server's log: three times the prompt, half the answer of the sample.

    Arrivals lie between the last profile (at most ten minutes ago) and now, so that the watch sees them as new.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tideforge.data.files import whole
    from tideforge.data.logs import sample_path
    from tideforge.data.schema import LOG_SCHEMA
    from tideforge.tasks.drift import last_profile

    _, manifest = last_profile(endpoint)
    now = time.time()
    start = max(manifest.finished + 1, now - 600)
    if start >= now:
        raise UserError("the last profile", "is not a second old", "try again in a moment")
    rows = pq.read_table(sample_path("azure_conv_2023"), columns=["prompt_tokens", "output_tokens"]).slice(0, requests)
    count = rows.num_rows
    columns = {
        "request_id": [f"shift-{secrets.token_hex(8)}" for _ in range(count)],
        "arrival": [round((start + (now - start) * i / count) * 1e6) for i in range(count)],
        "prompt_tokens": [3 * int(value) for value in rows["prompt_tokens"].to_pylist()],
        "output_tokens": [max(1, int(value) // 2) for value in rows["output_tokens"].to_pylist()],
    }
    arrays = [
        pa.array(columns[field.name], pa.int64() if field.name == "arrival" else field.type).cast(field.type)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in LOG_SCHEMA
    ]
    path = endpoint.state / "traffic" / f"shifted-{int(now)}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary:
        pq.write_table(pa.Table.from_arrays(arrays, schema=LOG_SCHEMA), temporary)
    return path


def drift_night(servers: stack.Stack, endpoint: Endpoint, say: Say, patience_s: float = 180) -> Run:
    """Runs the watch once and follows the night that the automation starts, until it waits for a person or has ended."""
    api, since = servers.prefect_api, datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    state = follow.follow(api, follow.start(api, follow.HOURLY, {"endpoint": servers.endpoint}), endpoint, say)
    if state["type"] != "COMPLETED":
        raise TideforgeError(f"the watch {state['name'].lower()}: {state['message']}")
    newest = max((endpoint.state / "drift").glob("*.json"))
    say(f"decision: {newest}")
    deadline = time.monotonic() + patience_s
    while not (started := follow.runs_since(api, follow.NIGHTLY, since)):
        if time.monotonic() > deadline:
            raise TideforgeError(f"the automation started no night in {patience_s:.0f} s; the decision is in {newest}")
        time.sleep(1)
    flow_run = str(started[0]["id"])
    say(f"the automation started: {started[0]['parameters'].get('reason')}")
    say(follow.link(servers.prefect, flow_run))
    state = follow.follow(api, flow_run, endpoint, say, (*follow.FINAL, "PAUSED"))
    run = follow.run_of(endpoint, flow_run)
    if run is None or state["type"] not in ("COMPLETED", "PAUSED"):
        raise TideforgeError(f"the night {state['name'].lower()}: {state['message']}; logs: {endpoint.state / 'logs'}")
    return run
