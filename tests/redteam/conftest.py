"""A real service of a tiny model, and candidates made of the plain forward and harm."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

import tideforge.engine
from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.bench import harmful
from tideforge.engine.client import EngineClient, EngineControl
from tideforge.engine.config import Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.events import read_events
from tideforge.engine.forward import Forward
from tideforge.engine.guard import start_detached
from tideforge.engine.lab import keeper_status
from tideforge.engine.outcome import Trial
from tideforge.engine.service_config import ServiceConfig

HARM = Path(__file__).parent / "harm"
LLAMA = Path(tideforge.engine.__file__).parent / "models" / "llama"
MEMORY_BYTES = 1 << 30
IMPORTS = (
    "ctypes", "gc", "mmap", "os", "pathlib", "signal", "struct", "subprocess", "sys", "tempfile", "threading", "time",
)  # fmt: skip


def harms() -> dict[str, ModuleType]:
    return harmful.kinds(HARM)


def candidate(plain: Forward, parts: Sequence[tuple[str, str]]) -> Forward:
    return harmful.candidate(plain, parts, harms())


@dataclasses.dataclass
class Engine:
    """A running service, its folders, and what a harmful candidate must not change."""

    client: EngineClient
    night: Path
    state: Path

    def submitted(self, forward: Forward) -> str:
        return self.client.submit(forward, submitter="redteam")

    def good(self, mark: str) -> str:
        plain = self.client.incumbent()
        return self.submitted(plain.with_file("forward.py", plain.files["forward.py"] + f"\n# {mark}\n"))

    def ended(self, name: str, timeout_s: float = 60) -> Trial:
        trial = self.client.wait(name, timeout_s)
        assert trial.done, f"{name} is not done after {timeout_s:g} s"
        return trial

    def events(self, kind: str, folder: Path | None = None) -> list[dict]:
        return [event for event in read_events(folder or self.night) if event["event"] == kind]

    def leftovers(self) -> list[str]:
        """Processes that candidates started and that still run: of other workers than the incumbent's and the spare, or the
        sleeper that hides its origin."""
        kept = {str(path) for path in (self.state / "scratch").iterdir()}
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes().decode()
                environment = (path / "environ").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue
            folder = next((line[7:] for line in environment if line.startswith("TMPDIR=")), "")
            stranger = folder.startswith(str(self.state)) and folder not in kept
            if command and (stranger or "42421" in command):
                found.append(f"{path.name} {command}")
        return found

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.state.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    night = tmp_path_factory.mktemp("harm")
    state = night / "s"
    state.mkdir()
    corpus = tuple((7 * i + i // 11) % 250 for i in range(2000))
    shapes = tuple(RequestShape(6 + i, 12) for i in range(4))
    workload = Workload(users=4, search=shapes, held_out=shapes, corpus=corpus, profile="p", seed=0)
    (night / "workload.json").write_text(workload.to_json())
    model = tiny_llama(night / "model")
    config = ServiceConfig(
        settings=Settings(state=state, model=model, num_blocks=64, worker_memory_bytes=MEMORY_BYTES),
        night=night, incumbent=LLAMA, workload=night / "workload.json", passes=1, tune=False,
        trial_s=harmful.hang_s(MEMORY_BYTES), allow_imports=IMPORTS, exit_at=time.time() + 900,
    )  # fmt: skip
    config.write(night / "service.json")
    command = [sys.executable, "-m", "tideforge.engine.supervise", "--config", str(night / "service.json")]
    start_detached(command, night / "service.log")
    client = EngineClient(state / "engine.sock", patience_s=60)
    client.incumbent()
    yield Engine(client, night, state)
    EngineControl(state).stop()
    if (status := keeper_status(state)) is not None:
        os.kill(status["pid"], signal.SIGTERM)
