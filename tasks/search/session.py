"""Opens and closes the night's search: the persistent engine, the board, the deadline; then what came of it as files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tideforge.data.files import read_json, sha256_file, write_whole
from tideforge.data.workload import Workload
from tideforge.engine.archive import read_trials
from tideforge.engine.client import SOCKET, EngineClient, EngineControl
from tideforge.engine.config import ModelConfig
from tideforge.engine.depths import depths_of
from tideforge.engine.events import log_event, read_events, read_lines
from tideforge.engine.outcome import FAST, SLOW
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.setting import Setting, id_of
from tideforge.errors import CandidateError, UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.engine_start import start_service
from tideforge.tasks.incumbent import incumbent_folder
from tideforge.tasks.machine import floor_figures, noise_trials, settings_for
from tideforge.tasks.objective import measured, require_room, require_short
from tideforge.tasks.search.agent import AgentReport
from tideforge.tasks.search.promote import Promotion
from tideforge.tasks.search.search import finalist
from tideforge.tasks.store import Manifest, Run

IDLE_EXIT_S = 120.0  # how long past its deadline an idle service waits for a flow that may have been killed


@dataclasses.dataclass(frozen=True)
class Session:
    """What an agent needs to take part."""

    socket: Path
    board: Path
    workspaces: Path
    deadline: float  # seconds since the epoch
    tier: str = SLOW  # what agents' candidates are measured on


def search_inputs(run: Run, endpoint: Endpoint) -> dict[str, str]:
    workload = run.need("workload")
    budget = endpoint.budget
    agents = json.dumps([spec.model_dump(mode="json") for spec in endpoint.agents], sort_keys=True)
    return {
        "workload": workload.outputs["workload"].sha256,
        "budget": f"{budget.search_s:g} s, {budget.search_pairs} passes",
        "agents": agents,
        "tier": endpoint.search.tier,
        "objective": repr(measured(endpoint)),
    }


def tier_of(endpoint: Endpoint) -> tuple[str, str]:
    """What the night screens on, and why it is not what the endpoint asks for: too short a model, or another objective."""
    if endpoint.search.tier == FAST:
        if (figure := measured(endpoint).maximize) != "output_tps":
            return SLOW, f"the fast tier measures layers' output_tps, not {figure}"
        try:
            depths_of(ModelConfig.load(endpoint.model))
        except CandidateError as error:
            return SLOW, error.message
    return endpoint.search.tier, ""


def reserved_s(endpoint: Endpoint, tier: str) -> float:
    """Seconds before the deadline at which screening ends, so that what goes on last is still measured."""
    return min(endpoint.budget.search_s / 4, 2 * endpoint.budget.trial_s) if tier == FAST else 0.0


def promotion(run: Run, endpoint: Endpoint, patience_s: float) -> Promotion:
    state = endpoint.state.resolve()
    return Promotion(run.folder.resolve(), state / "forwards", EngineClient(state / SOCKET, patience_s))


def meanwhile(run: Run, endpoint: Endpoint, tier: str) -> Callable[[], object]:
    """What is to be done every few seconds while agents search."""
    return promotion(run, endpoint, 0).try_step if tier == FAST else lambda: None


def open_search(run: Run, endpoint: Endpoint) -> Session:
    """Starts the engine, or finds the one that runs for this night. What a killed flow had spent of the budget stays spent."""
    config_path = run.folder / "service.json"
    client = EngineClient(endpoint.state.resolve() / SOCKET, patience_s=120)
    deadline = time.time() + max(0.0, endpoint.budget.search_s - _spent_s(run))
    config = _config(run, endpoint, deadline)
    if _serves(client, run):
        _end_if_another(endpoint, config)
    config.write(config_path)
    if not _serves(client, run):
        _make_way(endpoint)
        start_service(endpoint.state.resolve(), run.folder)
    client.incumbent()  # of an engine that was there already it blocks until the incumbent runs and is tuned: that is not the agents' time
    deadline = time.time() + max(0.0, endpoint.budget.search_s - _spent_s(run))
    _note(run, "opened", deadline)
    folder = run.folder.resolve()
    tier, why = tier_of(endpoint)
    log_event(run.folder, "search_tier", tier=tier, **({"instead_of": FAST, "reason": why} if why else {}))
    return Session(client.path, folder / "board.jsonl", folder / "agents", deadline - reserved_s(endpoint, tier), tier)


def _config(run: Run, endpoint: Endpoint, deadline: float) -> ServiceConfig:
    folder, workload = incumbent_folder(run, endpoint).resolve(), run.path(run.need("workload"), "workload").resolve()
    return service_config(endpoint, run.folder.resolve(), folder, workload, deadline + IDLE_EXIT_S)


def service_config(
    endpoint: Endpoint, night: Path, incumbent: Path, workload: Path, exit_at: float | None = None
) -> ServiceConfig:
    """What an engine of this endpoint is started with; `night` is the folder of its archive."""
    bandwidth, cache = floor_figures(endpoint)
    requests, settings = Workload.read(workload), settings_for(endpoint)
    require_short(endpoint, requests)
    require_room(requests, settings.limits.max_model_len)
    return ServiceConfig(
        settings=settings,
        night=night,
        incumbent=incumbent,
        workload=workload,
        objective=measured(endpoint),
        passes=endpoint.budget.search_pairs,
        noise_trials=noise_trials(endpoint),
        trial_s=endpoint.budget.trial_s,
        allow_imports=tuple(endpoint.allow_imports),
        bandwidth_bytes_per_s=bandwidth,
        cache_bytes=cache,
        devices=tuple(endpoint.search.devices),
        exit_at=exit_at,
    )


def _make_way(endpoint: Endpoint) -> None:
    """A night does not share the machine with an engine that somebody started by hand; what waits there is kept."""
    from tideforge.tasks import by_hand

    with contextlib.suppress(UserError):  # another night's: it answers to nobody but its own flow
        by_hand.stop(endpoint)


def _end_if_another(endpoint: Endpoint, config: ServiceConfig) -> None:
    """The night's engine of before a resume, where the endpoint asks for another setting by now."""
    from tideforge.tasks import by_hand

    if id_of(config.night) != Setting.of(config).id:
        by_hand.end(endpoint)


def _serves(client: EngineClient, run: Run) -> bool:
    """Whether an engine answers that works for this very night."""
    probe = EngineClient(client.path, patience_s=0)
    try:
        return probe.status()["night"] == str(run.folder.resolve())
    except Exception:
        return False


def _note(run: Run, what: str, deadline: float) -> None:
    """search-sessions.jsonl: each opening with its time, so that a resumed night knows what is left."""
    with (run.folder / "search-sessions.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "what": what, "deadline": deadline}) + "\n")


def sessions(run: Run) -> list[dict[str, float]]:
    path = run.folder / "search-sessions.jsonl"
    return [entry for entry in read_lines(path) if "time" in entry and "deadline" in entry]


def _spent_s(run: Run) -> float:
    """Seconds of searching so far: of each earlier opening, until its last trial event."""
    openings = [entry["time"] for entry in sessions(run)]
    ends = [event["time"] for event in read_events(run.folder) if event["event"] in ("trial_start", "trial_end")]
    spent = 0.0
    for begin, following in zip(openings, [*openings, float("inf")][1:], strict=True):
        inside = [end for end in ends if begin <= end < following]
        spent += max(inside) - begin if inside else 0.0
    return spent


def close_search(run: Run, endpoint: Endpoint, reports: Sequence[AgentReport]) -> Manifest:
    """Ends the queue and the engine, and writes the search's files. Trials that still waited become `cancelled`."""
    inputs = search_inputs(run, endpoint)
    if (done := run.done("search", inputs)) is not None:
        return done
    state = endpoint.state.resolve()
    client, control = EngineClient(state / SOCKET, patience_s=60), EngineControl(state, patience_s=60)
    if tier_of(endpoint)[0] == FAST:
        promotion(run, endpoint, 60).finish(sessions(run)[-1]["deadline"], control.cancel)
    control.cancel("the search ended before this candidate's turn")
    while client.queue().running is not None:
        time.sleep(0.2)
    control.stop()
    setting = id_of(run.folder)
    trials = [trial for trial in read_trials(run.folder) if trial.setting == setting]
    best = finalist(trials)
    started = sessions(run)[0]["time"]
    board = run.folder / "board.jsonl"
    if not board.exists():
        write_whole(board, b"")
    outputs = {
        "trials": run.write_json("trials", [json.loads(trial.to_json()) for trial in trials]),
        "board": run.add_file("board", board),
        "agents": run.write_json("agents", [report.model_dump(mode="json") for report in reports]),
    }
    remedy = "remove it and run the search again: its engine makes it anew"
    names = ("incumbent", "served", "knobs", "bounds")
    tuned = read_json(run.folder / "tuned.json", lambda raw: {name: raw[name] for name in names}, remedy)
    noise = read_json(run.folder / "noise.json", lambda raw: list(map(float, raw["log_ratios"])), remedy)
    extra = {
        "finalist": best.forward if best else None,
        "finalist_trial": best.id if best else None,
        **tuned,
        "noise": noise,
        "tiers": dict(Counter(trial.tier for trial in trials if trial.done)),
        "searched_s": time.time() - started,
        "tuned_sha256": sha256_file(run.folder / "tuned.json"),
    }
    return run.finish("search", inputs, outputs, extra, started=started)
