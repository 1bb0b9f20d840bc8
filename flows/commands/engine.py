"""`tideforge engine start|status|submit|trials|stop`: the persistent engine outside a night, for people and scripts."""

from __future__ import annotations

import dataclasses
import getpass
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tideforge.errors import PREFIX
from tideforge.flows.commands.options import STATE, Finite, load

if TYPE_CHECKING:
    from tideforge.engine.outcome import Trial
    from tideforge.tasks.listing import Listing

F = TypeVar("F", bound=Callable[..., Any])
JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON object")


def where(command: F) -> F:
    """--endpoint and --state: which endpoint is meant."""
    endpoint = click.option(
        "--endpoint", "endpoint_file", required=True, type=click.Path(path_type=Path), help="endpoint file (YAML)"
    )
    return endpoint(STATE(command))


def note(text: str) -> None:
    click.echo(f"{PREFIX}{text}", err=True)


@click.group()
def engine() -> None:
    """Try candidates by hand: start the persistent engine of an endpoint, submit forwards, read their trials.

    It is the engine that a night's search uses, with the same measuring and the same outcomes, fed by you. It holds the
    incumbent and stays up until it is stopped, or until a night of the endpoint begins; candidates that still wait are
    evaluated after the next start with the same setting: objective, weights, workload, incumbent, limits, kind of device.
    While a night searches, only `status` and `trials` work.

    \b
    tideforge engine start --endpoint my.yaml
    tideforge engine submit ./candidate --endpoint my.yaml --wait
    tideforge engine trials --endpoint my.yaml
    tideforge engine stop --endpoint my.yaml
    """


@engine.command()
@where
@click.option("--run", "run_id", help="take the workload of this run; the newest run with a profile if absent")
@JSON
def start(endpoint_file: Path, state: Path | None, run_id: str | None, as_json: bool) -> None:
    """Start the engine and wait until the incumbent is up and tuned.

    It replays the workload of a run (`tideforge node ingest` and `node profile` make one), as the endpoint file asks for it now.
    The keeper, and so the weights, stay loaded after a stop. Starting what runs already changes nothing, and is refused when
    the endpoint asks for another setting by now.
    """
    from tideforge.tasks import by_hand

    folder, new = by_hand.start(load(endpoint_file, state), run_id, note)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "run": folder.name, "started": new}))
    else:
        click.echo(f"{'started' if new else 'runs already'}, workload of run {folder.name}; its archive: {folder}")


@engine.command()
@where
@JSON
def status(endpoint_file: Path, state: Path | None, as_json: bool) -> None:
    """Say whether an engine runs, for whom, and how long its queue is. Exit code 0 either way."""
    from tideforge.tasks import by_hand

    endpoint = load(endpoint_file, state)
    folder = by_hand.folder_in_use(endpoint)
    if folder is None:
        pid = by_hand.service_pid(endpoint)
        facts = {"runs": False} if pid is None else {"runs": False, "pid": pid}
        said = "no engine runs" if pid is None else f"an engine starts or ends, and does not answer (pid {pid})"
        click.echo(json.dumps(facts) if as_json else said)
        return
    queue = by_hand.client(endpoint).queue()
    night = not by_hand.is_by_hand(endpoint, folder)
    facts = {"runs": True, "folder": str(folder), "night": folder.name if night else None, **dataclasses.asdict(queue)}
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{'the night' if night else 'started by hand, workload of'} {folder.name}")
    stopping = "stopping; " if queue.stopping else ""
    ready = "ready" if queue.ready else "starting"
    click.echo(f"  {stopping}incumbent {ready}, {queue.waiting} waiting, running: {queue.running or '-'}")


@engine.command()
@click.argument("folder", type=click.Path(path_type=Path))
@where
@click.option(
    "--tier",
    type=click.Choice(["slow", "fast"]),
    default="slow",
    show_default=True,
    help="all layers, or the difference of two small depths",
)
@click.option("--wait", "waits", is_flag=True, help="wait for the trial; exit code 1 unless it passed")
@click.option("--timeout", "timeout_s", type=Finite(min=0), default=600, show_default=True, help="seconds to wait")
@JSON
def submit(
    folder: Path, endpoint_file: Path, state: Path | None, tier: str, waits: bool, timeout_s: float, as_json: bool
) -> None:
    """Queue the candidate in FOLDER (forward.py, its own other files, knobs.json) and print its trial's id.

    Begin with a copy of the incumbent's raw source (engine/models/llama, moe or mla; cp -rL, for some files are links) without its
    knobs.json: it then gets the incumbent's, which are tuned and frozen. The same files are the same trial while
    the setting is the same: submitted again they are not measured again.
    """
    from tideforge.tasks import by_hand

    endpoint = load(endpoint_file, state)
    name = by_hand.submit(endpoint, folder, tier, getpass.getuser())
    client = by_hand.client(endpoint, patience_s=60)  # it may be killed and started again meanwhile
    trial = client.wait(name, timeout_s) if waits else client.trial(name)
    click.echo(trial.to_json() if as_json else line(trial))
    if waits and not trial.done:
        note(f"{trial.id} has not ended within {timeout_s:g} s and goes on; ask again with: tideforge engine trials")
    if waits and trial.figures is None:
        raise SystemExit(1)


@engine.command()
@where
@click.option(
    "--run", "run_id", help="of the engine on this run's workload, or of this night; the running one if absent"
)
@click.option("--all", "every", is_flag=True, help="those under other settings too, each marked with its setting")
@JSON
def trials(endpoint_file: Path, state: Path | None, run_id: str | None, every: bool, as_json: bool) -> None:
    """List trials in the order of submission: outcome, speed against the incumbent, seconds of each part.

    The ratio is of the objective that the row names, with its 95 % interval, and above 1 where the candidate is better: of
    output_tps and tps_per_user_p90, of which more is better, it is candidate / incumbent; of ttft (P90), of which less is
    better, incumbent / candidate. Beside it stand both sides' own figures, in the objective's unit; on the fast
    tier, whose ratio is of layers alone, the candidate's output tokens/s at the larger of its two depths.

    Shown are trials under the setting that the engine was started with last (objective, weights, workload, incumbent,
    limits, kind of device). Reads the archive, so no engine has to run.
    """
    from tideforge.tasks import listing

    found = listing.trials(load(endpoint_file, state), run_id)
    shown = sorted([*found.present, *(found.others if every else ())], key=lambda trial: trial.id)
    if as_json:
        click.echo(json.dumps({**_head(found), "trials": [json.loads(trial.to_json()) for trial in shown]}))
        return
    click.echo(f"{len(found.present)} trials in {found.folder}{_others(found, every)}")
    for trial in shown:
        click.echo(line(trial) + ("" if trial in found.present else f"  [setting {trial.setting or 'unknown'}]"))


def _head(found: Listing) -> dict[str, Any]:
    """What holds for all that are shown. `others`: how many there are under other settings."""
    setting = found.setting
    objective = setting.objective if setting else None
    return {
        "folder": str(found.folder), "setting": setting.id if setting else None, "objective": objective,
        "others": len(found.others),
    }  # fmt: skip


def _others(found: Listing, every: bool) -> str:
    if not found.others:
        return ""
    return f", and {len(found.others)} under other settings" + ("" if every else " (--all shows them)")


def line(trial: Trial) -> str:
    """id, tier, outcome, figures or why there are none."""
    what = str(trial.outcome or "waits")
    spent = f"stage {trial.stage_s:.1f} check {trial.check_s:.1f} clock {trial.clock_s:.1f} gates {trial.gates_s:.1f} s"
    if (seen := trial.figures) is None:
        return f"{trial.id}  {trial.tier}  {what:15}  {spent if trial.done else ''}  {trial.message}".rstrip()
    return f"{trial.id}  {trial.tier}  {what:15}  {spent}  {seen.told}"


@engine.command()
@where
@click.option("--keeper", is_flag=True, help="end the keeper too: the next start reads the weights again")
@JSON
def stop(endpoint_file: Path, state: Path | None, keeper: bool, as_json: bool) -> None:
    """End the engine after its running trial. What still waits is evaluated after the next start.

    The keeper stays, so that the next start need not load the weights (one that finds the model changed does); a night's engine is
    left alone.
    """
    from tideforge.engine.keepers import retire_keepers
    from tideforge.tasks import by_hand

    endpoint = load(endpoint_file, state)
    ended = by_hand.stop(endpoint)
    keepers = retire_keepers(endpoint.state) if keeper else 0
    if as_json:
        click.echo(json.dumps({"stopped": ended, **({"keepers": keepers} if keeper else {})}))
        return
    click.echo("stopped" if ended else "no engine was running")
    if keeper:
        click.echo("keeper ended" if keepers else "no keeper was running")
