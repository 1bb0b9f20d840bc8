"""The persistent engine outside a night: started, asked and ended by a person or a script.

Its archive is `<state>/engine/<run>/`, where <run> is the night whose profile it replays, so that trials on one traffic stand
together and survive any stop. Trials under another setting (objective, weights, workload, incumbent: engine/setting.py) are kept
there too, apart. One engine an endpoint: a night that begins ends this one first, a night's own is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tideforge.data.files import full_disk_named
from tideforge.engine.claim import holder
from tideforge.engine.client import LOCK, SOCKET, EngineClient, EngineControl
from tideforge.engine.forward import KNOBS, Forward
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.setting import Setting
from tideforge.errors import CandidateError, ProtocolError, TideforgeError, UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.engine_start import start_service
from tideforge.tasks.incumbent import serving_forward
from tideforge.tasks.machine import check_endpoint
from tideforge.tasks.night import runs_root
from tideforge.tasks.search.session import service_config
from tideforge.tasks.store import Run

FOLDER = "engine"
END_S = 180.0  # a running trial is finished first

Say = Callable[[str], object]


def client(endpoint: Endpoint, patience_s: float = 0.0) -> EngineClient:
    return EngineClient(endpoint.state.resolve() / SOCKET, patience_s)


def folder_in_use(endpoint: Endpoint) -> Path | None:
    """The folder that the running engine works for, None when none runs."""
    with contextlib.suppress(UserError):
        return Path(str(client(endpoint).status()["night"]))
    return None


def service_pid(endpoint: Endpoint) -> int | None:
    """Of the service of this state folder, whether it answers already, or still."""
    return holder(endpoint.state.resolve() / LOCK)


def is_stopping(endpoint: Endpoint) -> bool:
    with contextlib.suppress(UserError):
        return client(endpoint).queue().stopping
    return False


def is_by_hand(endpoint: Endpoint, folder: Path) -> bool:
    return folder.parent == endpoint.state.resolve() / FOLDER


def require_no_night(endpoint: Endpoint) -> Path | None:
    """Raises UserError when the engine that runs is a night's; else its folder, if one runs."""
    folder = folder_in_use(endpoint)
    if folder is not None and not is_by_hand(endpoint, folder):
        raise UserError(
            str(endpoint.state / SOCKET), f"belongs to the night {folder.name}, which is searching",
            "wait for its end; `tideforge engine trials` shows how far it is",
        )  # fmt: skip
    return folder


def require_own(endpoint: Endpoint) -> Path:
    """The folder of the engine started by hand. UserError when none runs, or a night's."""
    folder = require_no_night(endpoint)
    if folder is None:
        raise UserError(str(endpoint.state / SOCKET), "no engine runs", "start one: tideforge engine start")
    return folder


@contextlib.contextmanager
def alone(endpoint: Endpoint, say: Say) -> Iterator[None]:
    """One start at a time."""
    root = endpoint.state / FOLDER
    root.mkdir(parents=True, exist_ok=True)
    with (root / "start.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another start is under way; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start(endpoint: Endpoint, run_id: str | None, say: Say) -> tuple[Path, bool]:
    """Starts the engine on a run's workload and waits until the incumbent is up and tuned. Its folder, and whether it is new.

    Without an id it takes the newest run that has a profile. `say` is told what is waited for.
    """
    check_endpoint(endpoint)
    run = workload_run(endpoint, run_id)
    with full_disk_named(endpoint.state), alone(endpoint, say):
        running = after_its_stop(endpoint, say)
        folder = endpoint.state.resolve() / FOLDER / run.id
        if running is not None and running != folder:
            raise UserError(
                str(endpoint.state / SOCKET), f"an engine runs on the workload of {running.name}",
                "stop it first: tideforge engine stop",
            )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        wanted = config(endpoint, run, folder)
        if running is not None:
            _require_same_setting(endpoint, wanted)
        else:
            wanted.write(folder / "service.json")
            start_service(endpoint.state.resolve(), folder)
        return folder, running is None


def _require_same_setting(endpoint: Endpoint, wanted: ServiceConfig) -> None:
    """UserError when the engine that runs was started for something else than the endpoint asks for by now."""
    running = Setting.read(wanted.night)
    if running is not None and (names := running.differs(Setting.of(wanted))):
        raise UserError(
            str(endpoint.state / SOCKET), f"an engine runs under another setting ({', '.join(names)} changed since)",
            "stop it first: tideforge engine stop",
        )  # fmt: skip


def after_its_stop(endpoint: Endpoint, say: Say) -> Path | None:
    """The folder of the engine that runs, None when none does; the end of one that is stopping is awaited."""
    deadline = time.monotonic() + END_S
    told = False
    while True:
        running = require_no_night(endpoint)
        if running is not None and not is_stopping(endpoint):
            return running
        if running is None and service_pid(endpoint) is None:
            return None
        if not told:
            say("the engine is stopping; waiting for the end of its running trial")
            told = True
        if time.monotonic() > deadline:
            raise TideforgeError(f"the engine that is stopping has not ended within {END_S:g} s; its trial still runs")
        time.sleep(0.1)


def config(endpoint: Endpoint, run: Run, folder: Path) -> ServiceConfig:
    forward = serving_forward(endpoint).save(endpoint.state.resolve() / "forwards")
    return service_config(endpoint, folder, forward, workload_file(endpoint, run, folder))


def workload_file(endpoint: Endpoint, run: Run, folder: Path) -> Path:
    """The run's own workload, made if missing. Where the endpoint asks for another by now, that one is made in `folder`: what a
    night was measured on stays as it is."""
    from tideforge.tasks.corpus import corpus_ids
    from tideforge.tasks.profile import sampled, workload, workload_inputs

    ids = corpus_ids(endpoint)
    own = run.manifest("workload") or workload(run, endpoint, ids)
    if run.done("workload", workload_inputs(run, endpoint, ids)) is not None:
        return run.path(own, "workload").resolve()
    output = Run(folder).write_bytes("workload", ".json", sampled(run, endpoint, ids).to_json().encode())
    return folder / output.path


def workload_run(endpoint: Endpoint, run_id: str | None) -> Run:
    """The run to take the workload from: the one named, else the newest that has a profile."""
    root = runs_root(endpoint)
    run = Run.open(root, run_id) if run_id is not None else _latest(root)
    run.need("profile")
    return run


def _latest(root: Path) -> Run:
    runs = [Run(path) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    profiled = [run for run in runs if run.manifest("profile") is not None]
    if not profiled:
        raise UserError(
            str(root), "no run there has a profile",
            "make one: tideforge node ingest, then tideforge node profile, both with --run NAME",
        )  # fmt: skip
    return max(profiled, key=lambda run: run.need("profile").finished)


def read_forward(folder: Path, incumbent: Forward) -> Forward:
    """A candidate as it lies in `folder`; without a knobs.json it gets the incumbent's. UserError when it cannot be one."""
    if not folder.is_dir():
        raise UserError(str(folder), "is not a folder", "give the folder that holds the candidate's forward.py")
    try:
        forward = Forward.load(folder)
    except (CandidateError, OSError, ValueError) as error:
        raise UserError(str(folder), f"is not a forward ({error})", "mend its files") from None
    if KNOBS not in forward.files:
        return forward.with_file(KNOBS, incumbent.files[KNOBS])
    with contextlib.suppress(CandidateError):  # no JSON: its trial says so
        if forward.knobs != incumbent.knobs:
            problem = f"differs from the incumbent's, which were tuned and are frozen: {json.dumps(incumbent.knobs)}"
            raise UserError(str(folder / KNOBS), problem, f"leave {KNOBS} out of the folder to get those")
    return forward


def submit(endpoint: Endpoint, folder: Path, tier: str, submitter: str) -> str:
    """The id of the candidate's trial."""
    require_own(endpoint)
    engine = client(endpoint)
    try:
        return engine.submit(read_forward(folder, engine.incumbent()), tier, submitter)
    except ProtocolError:
        if is_stopping(endpoint):
            raise UserError(
                str(endpoint.state / SOCKET), "the engine is stopping and takes no more candidates",
                "start it again: tideforge engine start",
            ) from None  # fmt: skip
        raise


def stop(endpoint: Endpoint) -> bool:
    """Ends the engine after its running trial; False when none ran. What waits is kept for the next start."""
    if require_no_night(endpoint) is None:
        return False
    end(endpoint)
    return True


def end(endpoint: Endpoint) -> None:
    """Ends whatever engine of the endpoint runs, after its running trial, and waits for that."""
    pid = service_pid(endpoint)
    with contextlib.suppress(UserError):  # it has ended meanwhile
        EngineControl(endpoint.state, patience_s=0).stop()
    deadline = time.monotonic() + END_S
    while pid is not None and service_pid(endpoint) == pid:
        if time.monotonic() > deadline:
            raise TideforgeError(f"the engine has not ended within {END_S:g} s; its trial still runs")
        time.sleep(0.1)
