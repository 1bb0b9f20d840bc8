"""A two-layer endpoint whose nights are real and short, the stack around it, and ways to kill parts of both."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import tideforge.engine
from tideforge.engine.client import EngineControl
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.forward import Forward
from tideforge.engine.lab import keeper_status
from tideforge.engine.outcome import Trial
from tideforge.flows import follow
from tideforge.tasks import stack
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.store import Run

CLI = [sys.executable, "-m", "tideforge.flows.cli"]
WHO, PASSPHRASE = "Ann Other", "correct horse"
LLAMA = Path(tideforge.engine.__file__).parent / "models" / "llama"

# An agent of the kind `command`: it takes most of the incumbent's needless work away, which no machine can miss.
GAINER = """
import json, os, re, subprocess, sys
from pathlib import Path

source = Path(os.environ["TIDEFORGE_INCUMBENT"])
ask = [sys.executable, "-m", "tideforge.tasks.search.ask"]
for share in (2, 5):
    target = Path(f"candidate-{share}")
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        text = file.read_text()
        if file.name == "forward.py":
            text = re.sub(r"NEEDLESS = (\\d+)", lambda found: f"NEEDLESS = {int(found[1]) // share}", text)
        (target / file.name).write_text(text)
    trial = json.loads(subprocess.run([*ask, "submit", str(target)], capture_output=True, text=True, check=True).stdout)["trial"]
    subprocess.run([*ask, "wait", trial, "--seconds", "10"], capture_output=True, check=True)
"""


def needless(folder: Path, passes: int) -> Path:
    """The plain forward with `passes` additions of nothing in each layer: an incumbent that is surely beaten."""
    first = Forward.load(LLAMA)
    source = first.files["forward.py"]
    slow = source.replace(
        "    def mlp(self, x: Tensor) -> Tensor:\n",
        "    def mlp(self, x: Tensor) -> Tensor:\n        for _ in range(NEEDLESS):\n            x = x + 0\n",
    ).replace("class Layer:\n", f"NEEDLESS = {passes}\n\n\nclass Layer:\n")
    assert slow.count("NEEDLESS") == 2
    folder.mkdir(parents=True)
    for name, text in first.with_file("forward.py", slow).files.items():
        (folder / name).write_text(text)
    return folder


def write_endpoint(folder: Path, **more: Any) -> Path:
    """Endpoint file of a two-layer random model; its state folder is short, as paths of sockets must be."""
    model = tiny_llama(folder / "model")
    flags = "--dtype float32 --max-num-seqs 8 --max-num-batched-tokens 256 --max-model-len 256"
    raw = {
        "name": "tiny",
        "model": str(model),
        "launch": f"tideforge serve --model {model} {flags}",
        "hardware": {"name": "cpu"},
        "traffic": {"logs": ["sample:azure_conv_2023"]},
        "workload": {"users": 8, "prompt_tokens": [8, 16], "output_tokens": 8, "search_output_tokens": 4},
        # 4 pairs make the test short, and no more are asked for than are planned; a real release wants 8
        "budget": {"search_s": 15, "trial_s": 10, "verify_s": 120, "search_pairs": 2, "held_out_pairs": 4},
        "agents": [{"name": "offline-1", "seed": 1}, {"name": "offline-2", "seed": 2}],
        "state": str(folder / "s"),
        **more,
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def eventually(what: str, test: Callable[[], Any], timeout_s: float) -> Any:
    """The first true value of `test`, asked every 50 ms."""
    deadline = time.monotonic() + timeout_s
    while not (found := test()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return found


@dataclasses.dataclass
class Place:
    """One endpoint on disk with what runs for it."""

    file: Path

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.load(self.file)

    @property
    def state(self) -> Path:
        return self.endpoint.state

    def run(self, run_id: str) -> Run:
        return Run(self.state / "runs" / run_id)

    def cli(self, *words: str, timeout_s: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
        command = [*CLI, *words, "--endpoint", str(self.file)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, **env}
        )

    def started(self, *words: str) -> subprocess.Popen[str]:
        """The same in a process group of its own, running on."""
        with (self.file.parent / "cli.log").open("a") as log:
            return subprocess.Popen(
                [*CLI, *words, "--endpoint", str(self.file)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip

    def trials(self, run_id: str) -> dict[str, Trial]:
        """What the archive on disk says, by id."""
        folders = sorted((self.run(run_id).folder / "trials").glob("*/submission.json"))
        results = [path.with_name("result.json") for path in folders]
        return {
            path.parent.name: Trial.read(path if path.exists() else path.with_name("submission.json"))
            for path in results
        }

    def finished(self, run_id: str) -> dict[str, bytes]:
        """The bytes of every finished trial's result."""
        found = sorted((self.run(run_id).folder / "trials").glob("*/result.json"))
        return {path.parent.name: path.read_bytes() for path in found}

    def down(self) -> None:
        """Ends stack, service and keeper of this endpoint; nothing else."""
        stack.down(self.state)
        with contextlib.suppress(Exception):
            EngineControl(self.state, patience_s=0).stop()
        with contextlib.suppress(Exception):
            if status := keeper_status(self.state):
                os.kill(int(status["pid"]), signal.SIGTERM)


@contextlib.contextmanager
def place_for(**more: Any) -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="tf-"))
    place = Place(write_endpoint(folder, **more))
    try:
        yield place
    finally:
        place.down()
        if not os.environ.get("TIDEFORGE_KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass
class Deployment:
    """The servers of an endpoint, and an approver whose key the server trusts."""

    place: Place
    servers: stack.Stack
    key: dict[str, str]  # variables under which the approver's commands find key and passphrase

    @property
    def api(self) -> str:
        return self.servers.prefect_api

    def serving(self) -> str:
        return str(httpx.get(f"{self.servers.server}/version", timeout=30).json()["forward"])

    def state_of(self, flow_run: str) -> str:
        return str(follow.state_of(self.api, flow_run)["type"])

    def waits(self, flow_run: str, timeout_s: float = 300) -> None:
        """Until the flow run is suspended and its process is gone."""
        state = follow.follow(
            self.api, flow_run, self.place.endpoint, lambda line: None, (*follow.FINAL, "PAUSED"), timeout_s
        )
        assert state["type"] == "PAUSED", f"{self.verdicts()} {state}: {self.tail()}"

    def verdicts(self) -> list[str]:
        """Why each verification so far ended as it did."""
        files = sorted((self.place.state / "runs").glob("*/verify.json"))
        return [f"{file.parent.name}: {json.loads(file.read_text())['extra'].get('reason')}" for file in files]

    def night(self, run_id: str) -> str:
        """A night through the deployment until it waits for a person; the id of its flow run."""
        parameters = {"endpoint": str(self.place.file), "run": run_id, "reason": "test", "approve": "form"}
        flow_run = follow.start(self.api, follow.NIGHTLY, parameters)
        self.waits(flow_run)
        return flow_run

    def ends(self, flow_run: str, timeout_s: float = 300) -> None:
        state = follow.follow(self.api, flow_run, self.place.endpoint, lambda line: None, timeout_s=timeout_s)
        assert state["type"] == "COMPLETED", f"{state}: {self.tail()}"

    def tail(self) -> str:
        return (self.place.state / "logs" / "worker.log").read_text()[-3000:]


@contextlib.contextmanager
def deployment_for() -> Iterator[Deployment]:
    """An incumbent with needless work, an agent that takes it away, Prefect, MLflow, the server and a worker."""
    with place_for() as place:
        folder = place.file.parent
        (folder / "gainer.py").write_text(GAINER)
        raw = yaml.safe_load(place.file.read_text())
        raw |= {
            "forward": str(needless(folder / "forward", 8000)),
            "agents": [{"kind": "command", "name": "gainer", "command": [sys.executable, str(folder / "gainer.py")]}],
            "budget": {**raw["budget"], "search_pairs": 3, "search_s": 30},  # two nights of it must gain beyond doubt
            "sandbox": "off",  # the agent's own file lies where a sandbox shows nothing
        }
        place.file.write_text(yaml.safe_dump(raw))
        key = {"TIDEFORGE_APPROVER_KEY": str(folder / "ann.pem"), "TIDEFORGE_PASSPHRASE": PASSPHRASE}
        made = place.cli("approver", "--create-key", "--name", WHO, **key)
        assert made.returncode == 0, made.stderr
        up = place.cli("up")
        assert up.returncode == 0, up.stderr
        servers = stack.Stack.read(place.state)
        assert servers is not None
        yield Deployment(place, servers, key)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with deployment_for() as made:
        yield made


@pytest.fixture
def place() -> Iterator[Place]:
    with place_for() as made:
        yield made


@pytest.fixture(name="eventually")
def _eventually() -> Callable[[str, Callable[[], Any], float], Any]:
    return eventually


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == name]


@pytest.fixture(name="events")
def _events() -> Callable[[Path, str], list[dict[str, Any]]]:
    return events


BROWSER = ("chromium", "chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1400,1500"
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A headless Chromium with an empty profile. Skips where it is absent; TIDEFORGE_REQUIRE_BROWSER=1 fails instead."""
    missing = [name for name in BROWSER if shutil.which(name) is None]
    if missing:
        reason = f"{' and '.join(missing)} not on PATH: apt-get install chromium chromium-driver"
        if os.environ.get("TIDEFORGE_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def screenshot(browser: Any) -> Callable[[str], None]:
    """Saves what the browser shows, where TIDEFORGE_SCREENSHOTS names a folder."""
    folder = os.environ.get("TIDEFORGE_SCREENSHOTS")

    def save(name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            assert browser.save_screenshot(str(Path(folder) / name))

    return save
