"""The approval of a real night on real servers: not by a resume without a code, through kills, in a real browser.

The first two tests share one night that waits; the third runs its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tideforge.engine.forward import Forward
from tideforge.engine.lab import Lab
from tideforge.engine.screen import screen
from tideforge.errors import CandidateError
from tideforge.flows import follow
from tideforge.tasks import stack
from tideforge.tasks.approve import read_release
from tideforge.tasks.approve import refusals as refusals_counted
from tideforge.tasks.endpoint import AgentSpec
from tideforge.tasks.machine import settings_for
from tideforge.tasks.search.search import environment, sandboxed
from tideforge.tasks.ship import releases
from tideforge.tasks.store import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # clients of selenium and prefect leave sockets to the garbage collector; none of it is ours
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# What a stranger sends: the form filled in without a code, and the record straight to the server. `post(url, body)`
# comes before it; the answers end up in `said`.
ATTEMPT = """
form = {{"approve": True, "code": "", "who": "Ann Other", "why": "trust me"}}
said = [
    post("{api}/flow_runs/{flow_run}/resume", {{"run_input": form}}),
    post("{server}/admin/ship", {{"record": {record}, "code": "please"}}),
]
"""
POST = """
def post(url, body):
    request = {module}.Request(url, json.dumps(body).encode(), {{"content-type": "application/json"}})
    said = "Service Unavailable"  # Prefect's word for a sqlite that is locked for a moment
    for _ in range(300):
        if "Service Unavailable" in said:
            try:
                said = {module}.urlopen(request, timeout=30).read().decode()
            except {error} as error:
                said = error.read().decode()
    return said
"""


@pytest.fixture(scope="module")
def waiting(deployment: Any) -> tuple[str, Run]:
    """A night that waits for a person: its flow run and its folder."""
    flow_run = deployment.night("n1")
    return flow_run, deployment.place.run("n1")


def attempt(deployment: Any, waiting: tuple[str, Run]) -> str:
    flow_run, run = waiting
    record = repr(read_release(run).to_record())
    return ATTEMPT.format(api=deployment.api, flow_run=flow_run, server=deployment.servers.server, record=record)


def by_hand(deployment: Any, waiting: tuple[str, Run], folder: Path) -> str:
    """As with curl."""
    said: dict[str, Any] = {}

    def post(url: str, body: Any) -> str:
        return follow.patient("POST", url, body).text

    exec(attempt(deployment, waiting), {"post": post}, said)
    return json.dumps(said["said"])


def by_an_agent(deployment: Any, waiting: tuple[str, Run], folder: Path) -> str:
    """A process as the search starts one: its environment, its sandbox where there is one."""
    folder = folder / "workspace"
    folder.mkdir()
    post = "import json, urllib.error, urllib.request" + POST.format(
        module="urllib.request", error="urllib.error.HTTPError"
    )
    (folder / "agent.py").write_text(post + attempt(deployment, waiting) + "print(json.dumps(said))\n")
    spec = AgentSpec(kind="command", name="intruder")
    prefix = sandboxed(spec, folder, folder / "agent.py", folder / "board.jsonl", "prefer")
    command = [*prefix, sys.executable, str(folder / "agent.py")]
    done = subprocess.run(command, env=environment(spec), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_a_candidate(deployment: Any, waiting: tuple[str, Run], folder: Path) -> str:
    """A forward that gets at the network through what torch has imported, in a worker, as it is built."""
    post = POST.format(module="torch.hub", error="torch.hub.HTTPError").replace("json.", "torch.hub.json.")
    body = textwrap.indent(
        attempt(deployment, waiting) + "raise RuntimeError(str([text[-200:] for text in said]))\n", "    "
    )
    source = f"import torch.hub\n{post}\n\ndef build(ctx):\n{body}"
    forward = Forward({"forward.py": source, "knobs.json": "{}\n"})
    screen(forward)  # static rules see nothing wrong
    endpoint = deployment.place.endpoint
    lab = Lab(settings_for(endpoint), folder)
    try:
        with pytest.raises(CandidateError) as caught:
            lab.spawn(forward, lab.arena("intruder"))
    finally:
        lab.close()
    return caught.value.message


@pytest.mark.parametrize("way", [by_hand, by_an_agent, by_a_candidate])
def test_a_resume_without_a_code_ships_nothing_and_says_why(
    deployment: Any,
    waiting: tuple[str, Run],
    way: Callable[..., str],
    tmp_path: Path,
    eventually: Callable[..., Any],
) -> None:
    flow_run, run = waiting
    before = deployment.serving()
    count = len(refusals(deployment, flow_run))
    said = way(deployment, waiting, tmp_path)
    assert "ACCEPT" in said, said  # Prefect lets anybody resume: the code is what counts
    assert "no signature" in said, said  # the server's answer
    eventually("the refusal is said", lambda: len(refusals(deployment, flow_run)) > count, 120)
    deployment.waits(flow_run)
    assert "no signature" in refusals(deployment, flow_run)[-1]
    assert run.manifest("approval") is None and run.manifest("ship") is None
    assert deployment.serving() == before and releases(deployment.place.state) == []


@pytest.mark.parametrize("body", [{"run_input": {"approve": False, "who": "Ann Other", "why": "throw it away"}}, {}])
def test_an_unsigned_rejection_throws_no_night_away(
    deployment: Any, waiting: tuple[str, Run], body: dict[str, Any], eventually: Callable[..., Any]
) -> None:
    flow_run, run = waiting
    count = refusals_counted(run)[0]
    said = follow.patient("POST", f"{deployment.api}/flow_runs/{flow_run}/resume", body).text
    assert "ACCEPT" in said, said
    eventually("it is counted", lambda: refusals_counted(run)[0] == count + 1, 120)
    deployment.waits(flow_run)
    assert run.manifest("approval") is None
    assert "no signature" in refusals_counted(run)[1]


def refusals(deployment: Any, flow_run: str) -> list[str]:
    """What the flow run's log says of forms that it refused."""
    query = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC", "limit": 200, "offset": 0}
    found: list[str] = []
    while page := httpx.post(f"{deployment.api}/logs/filter", json=query, timeout=30).raise_for_status().json():
        found += [line["message"] for line in page if "the form was refused" in line["message"]]
        query["offset"] += len(page)
    return found


def test_a_waiting_approval_survives_the_kill_of_everything_of_prefects(
    deployment: Any, waiting: tuple[str, Run], eventually: Callable[..., Any]
) -> None:
    flow_run, run = waiting
    processes = {process.name: process for process in deployment.servers.processes}
    worker = psutil.Process(processes["worker"].pid)
    eventually("the flow's process is gone", lambda: not worker.children(recursive=True), 60)
    for name in ("worker", "prefect"):
        assert processes[name].alive
        os.killpg(processes[name].pid, signal.SIGKILL)
        eventually(f"{name} is dead", lambda name=name: not processes[name].alive, 20)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{deployment.api}/health", timeout=5)

    up = deployment.place.cli("up")
    assert up.returncode == 0, up.stderr
    again = stack.Stack.read(deployment.place.state)
    assert again is not None and again.prefect == deployment.servers.prefect
    deployment.servers = again
    assert deployment.state_of(flow_run) == "PAUSED"
    release = read_release(run)
    assert deployment.serving() == release.incumbent
    approved = deployment.place.cli("approve", run.id, "--why", "read the diff", **deployment.key)
    assert approved.returncode == 0 and "the flow goes on" in approved.stdout, approved.stderr
    deployment.ends(flow_run)
    assert deployment.serving() == release.forward
    assert run.need("ship").extra["shipped"] == release.forward
    assert run.need("ship").extra["failed_requests"] == 0
    facts = run.need("approval").extra
    assert (facts["decision"], facts["who"], facts["why"]) == ("approve", "Ann Other", "read the diff")


def test_a_person_approves_in_the_browser(
    deployment: Any, browser: Any, screenshot: Callable[[str], None], eventually: Callable[..., Any]
) -> None:
    """The form of the real Prefect UI, filled in with the code that `tideforge code` prints."""
    flow_run, run = deployment.night("n2"), deployment.place.run("n2")
    release = read_release(run)
    code = deployment.place.cli("code", run.id, **deployment.key)
    assert code.returncode == 0, code.stderr

    def button(text: str) -> Any:
        def found() -> Any:
            shown = browser.find_elements("xpath", f"//button[normalize-space(.)='{text}']")
            return shown and shown[-1].is_displayed() and shown[-1]

        return eventually(f"the button {text}", found, 60)

    browser.get(f"{deployment.servers.prefect}/runs/flow-run/{flow_run}")
    button("Resume").click()
    field = "//*[contains(@class, 'p-modal')]//label[contains(., '{}')]/following::textarea[1]"
    eventually("the form", lambda: browser.find_elements("xpath", field.format("Code")), 60)

    def described() -> str:
        """What the form shows, once it is faded in: before that its text is empty."""
        shown = [element.text for element in browser.find_elements("css selector", ".p-modal")]
        return next((text for text in shown if release.forward in text), "")

    said = eventually("the form's description", described, 30)
    assert release.gain.ratio in said and "verdict" in said.lower()
    for label, text in (("Code", code.stdout.strip()), ("Who", "Ann Other"), ("Why", "seen in the browser")):
        browser.find_element("xpath", field.format(label)).send_keys(text)
    browser.find_element("css selector", ".p-modal [role=switch]").click()
    screenshot("approval-form.png")
    button("Submit").click()
    eventually("the flow goes on", lambda: deployment.state_of(flow_run) != "PAUSED", 60)
    deployment.ends(flow_run)
    assert deployment.serving() == release.forward == run.need("ship").extra["shipped"]
    facts = run.need("approval").extra
    assert (facts["who"], facts["why"], facts["signed"]) == ("Ann Other", "seen in the browser", True)
    assert releases(deployment.place.state)[-1]["record"]["run"] == run.id
    children = candidates(deployment, run)
    runs, experiment = json.dumps(children[:5]), json.dumps([run.need("track").extra["experiment"]])
    browser.get(f"{deployment.servers.mlflow}/#/compare-runs?runs={runs}&experiments={experiment}")

    def compared() -> bool:
        text = browser.find_element("tag name", "body").text
        return f"Comparing {len(children[:5])} Runs" in text and "ratio" in text

    eventually("MLflow's comparison of the candidates", compared, 60)
    screenshot("mlflow-compare.png")


def candidates(deployment: Any, run: Run) -> list[str]:
    """MLflow's ids of the child runs, one a candidate, of every night."""
    query = {"experiment_ids": [run.need("track").extra["experiment"]], "max_results": 20}
    url = f"{deployment.servers.mlflow}/api/2.0/mlflow/runs/search"
    found = httpx.post(url, json=query, timeout=30).raise_for_status().json()["runs"]
    children = [one for one in found if any(tag["key"] == "mlflow.parentRunId" for tag in one["data"]["tags"])]
    assert len(children) >= 2
    return [one["info"]["run_id"] for one in children]
