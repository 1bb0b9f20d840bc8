"""What a person decides, with a key of their own: code, approve, reject, approver, releases, rollback."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tideforge.errors import UserError
from tideforge.flows.commands.options import STATE, WHO

if TYPE_CHECKING:
    from tideforge.engine.release import Decision
    from tideforge.tasks.store import Run

F = TypeVar("F", bound=Callable[..., Any])


def where(command: F) -> F:
    """--endpoint and --state: which endpoint is meant."""
    endpoint = click.option("--endpoint", "endpoint_file", type=click.Path(path_type=Path), help="endpoint file (YAML)")
    return endpoint(STATE(command))


@click.command()
@click.argument("run", default="latest")
@where
@click.option("--reject", "rejects", is_flag=True, help="a code that rejects")
@WHO
def code(run: str, endpoint_file: Path | None, state: Path | None, rejects: bool, who: str | None) -> None:
    """Print the one-time code for the approval form of RUN (a run id, a run folder, or `latest`).

    The code is a signature, made with your private key, over exactly what the form shows. Paste it into the field
    `code` of the form in Prefect's UI. It works once, for this run, until the release expires. What is signed goes to
    standard error, the code alone to standard output.

    The key is read from TIDEFORGE_APPROVER_KEY, else ~/.config/tideforge/approver.pem; its passphrase is asked for, or
    read from TIDEFORGE_PASSPHRASE.

    \b
    tideforge code latest --endpoint my.yaml
    """
    from tideforge.engine.release import Decision

    found = resolve(run, endpoint_file, state)
    text, name = signed(found, Decision.REJECT if rejects else Decision.APPROVE, who)
    click.echo(f"signed by {name} for run {found.id}", err=True)
    click.echo(text)


@click.command()
@click.argument("run", default="latest")
@where
@click.option("--why", default="", help="a sentence for the record")
@WHO
def approve(run: str, endpoint_file: Path | None, state: Path | None, why: str, who: str | None) -> None:
    """Approve RUN: sign its release and resume the flow that waits for it.

    RUN is a run id, a run folder or `latest`. Who approved is read from the key, not from what you type. The server
    still refuses when by then another forward serves, its weights, launch command or environment differ, a file of the
    forward was changed, a newer night stands, or the release has expired.

    \b
    tideforge approve latest --endpoint my.yaml --why "12 % more, gates green, read the diff"
    """
    from tideforge.engine.release import Decision

    _decide(resolve(run, endpoint_file, state), Decision.APPROVE, why, who)


@click.command()
@click.argument("run", default="latest")
@where
@click.option("--why", required=True, help="the reason, kept in the run's record")
@WHO
def reject(run: str, endpoint_file: Path | None, state: Path | None, why: str, who: str | None) -> None:
    """Reject RUN with a reason; nothing ships. A run that was rejected cannot be approved afterwards.

    \b
    tideforge reject 20261130-020000-1f2e --why "the diff drops the mask of padded rows"
    """
    from tideforge.engine.release import Decision

    _decide(resolve(run, endpoint_file, state), Decision.REJECT, why, who)


def _decide(run: Run, decision: Decision, why: str, who: str | None) -> None:
    from tideforge.engine.release import Decision
    from tideforge.tasks.approve import decide
    from tideforge.tasks.night import stored_endpoint

    text, name = signed(run, decision, who)
    form: dict[str, Any] = {"approve": decision is Decision.APPROVE, "code": text, "who": name, "why": why}
    done = "approved" if decision is Decision.APPROVE else "rejected"
    if resume(run, form):
        click.echo(f"{done} run {run.id} as {name}; the flow goes on")
        return
    decide(run, stored_endpoint(run), **form)
    click.echo(f"{done} run {run.id} as {name}; recorded in {run.folder}")


@click.command()
@where
@click.option("--create-key", is_flag=True, help="make a private key for yourself, encrypted with a passphrase")
@click.option("--add", is_flag=True, help="let the endpoint trust a key that exists already")
@click.option("--name", help="the approver's name, as it shall stand in the record")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object: key id to name")
def approver(
    endpoint_file: Path | None, state: Path | None, create_key: bool, add: bool, name: str | None, as_json: bool
) -> None:
    """List the approvers of an endpoint, or become one.

    The private key goes to TIDEFORGE_APPROVER_KEY, else ~/.config/tideforge/approver.pem, and never leaves it; the
    public key goes to <state>/approvers.json. The server reads that file once, at its start: restart it to trust a
    new name.

    \b
    tideforge approver --create-key --name "Ann Other" --endpoint my.yaml
    tideforge approver --endpoint my.yaml
    """
    from tideforge.engine import release as keys

    path = state_folder(endpoint_file, state) / "approvers.json"
    if create_key or add:
        if not name:
            raise UserError("--name", "is missing", "give the name that shall stand in the record")
        where_key = keys.key_path()
        make = keys.create_key if create_key else keys.load_key
        private_key = make(where_key, passphrase(where_key, confirm=create_key))
        keys.add_approver(path, name, keys.public_bytes(private_key))
        click.echo(f"{name} may approve with the key in {where_key}; restart the server if it runs", err=True)
    trusted = {key: who for key, (who, _) in sorted(keys.read_approvers(path).items(), key=lambda item: item[1][0])}
    if as_json:
        click.echo(json.dumps(trusted))
        return
    for key, who in trusted.items():
        click.echo(f"{key}  {who}")


@click.command()
@where
@click.option("--json", "as_json", is_flag=True, help="print one JSON array, with records and signatures")
def releases(endpoint_file: Path | None, state: Path | None, as_json: bool) -> None:
    """List what was shipped and rolled back, oldest first, and which of it serves now.

    \b
    tideforge releases --endpoint my.yaml
    """
    from rich.console import Console
    from rich.table import Table

    from tideforge.tasks.ship import releases as listed

    folder = state_folder(endpoint_file, state)
    entries, serving = listed(folder), _serving(folder)
    if as_json:
        click.echo(json.dumps([{**entry, "serves": entry["record"]["nonce"] == serving} for entry in entries]))
        return
    table = Table("n", "", "forward", "replaced", "gain", "who", "when", "why")
    for entry in entries:
        record = entry["record"]
        when = datetime.datetime.fromtimestamp(entry["shipped_at"], datetime.UTC)
        mark = "serves" if record["nonce"] == serving else ""
        table.add_row(
            str(entry["n"]), mark, record["forward"][:12], record["incumbent"][:12],
            record["gain"]["ratio"] or entry["decision"], entry["who"], f"{when:%Y-%m-%d %H:%M}", entry.get("why", ""),
        )  # fmt: skip
    Console().print(table if entries else "no release yet: the endpoint's first forward serves")


@click.command()
@where
@click.option(
    "--to", "number", type=int, help="number of the release to return to; without it: what the last one replaced"
)
@click.option("--why", default="", help="a sentence for the record")
@WHO
def rollback(endpoint_file: Path | None, state: Path | None, number: int | None, why: str, who: str | None) -> None:
    """Put an earlier forward back into the running server. Signed like an approval; open requests are not cut off.

    \b
    tideforge rollback --endpoint my.yaml --why "P90 rose under real traffic"
    tideforge rollback --endpoint my.yaml --to 3
    """
    from tideforge.tasks.night import stored_endpoint
    from tideforge.tasks.ship import roll_back, rollback_release
    from tideforge.tasks.store import Run
    from tideforge.tasks.track import moved

    folder = state_folder(endpoint_file, state)
    release = rollback_release(folder, number)
    private_key, name = unlocked(folder, who)
    path = roll_back(folder, release, private_key, name, why)
    click.echo(f"forward {release.forward[:12]} serves again; {path}")
    if not moved(stored_endpoint(Run(folder / "runs" / release.run)), "rollback", release.forward):
        click.echo("MLflow is away: its alias moves with `tideforge report --sync`", err=True)


# --- which run, which key, which flow


def state_folder(endpoint_file: Path | None, state: Path | None) -> Path:
    """--state, else the endpoint file's `state`, else .tideforge."""
    if state is None and endpoint_file is not None:
        from tideforge.tasks.endpoint import Endpoint

        state = Endpoint.load(endpoint_file).state
    return state or Path(".tideforge")


def resolve(name: str, endpoint_file: Path | None, state: Path | None) -> Run:
    """A run by id, by folder, or the newest one that has a release."""
    from tideforge.tasks.night import find_run
    from tideforge.tasks.store import Run

    if (Path(name) / "run.json").is_file():
        return Run(Path(name).resolve())
    given = endpoint_file is not None or state is not None
    root = state_folder(endpoint_file, state)
    if name != "latest":
        return Run.open(root / "runs", name) if given else find_run(name)
    waiting = [path.parent for path in root.glob("runs/*/release.json" if given else "**/runs/*/release.json")]
    if not waiting:
        raise UserError(
            "latest", f"no run under {root} has a release", "give a run id, --endpoint FILE or --state FOLDER"
        )
    return Run(max(waiting, key=lambda folder: folder.name).resolve())


def signed(run: Run, decision: Decision, who: str | None = None) -> tuple[str, str]:
    """The code and the name it stands for. Refused, with nothing signed, when the run folder does not hold together."""
    from tideforge.engine.release import Decision, sign
    from tideforge.tasks.approve import check_release, read_release, state_of

    release = check_release(run) if decision is Decision.APPROVE else read_release(run)
    gain = f"{release.gain.ratio} [{release.gain.ci_low}, {release.gain.ci_high}]"
    replaced = f"forward {release.forward[:16]} for {release.incumbent[:16]}"
    click.echo(f"{decision} {release.endpoint}: {replaced}, gain {gain}", err=True)
    private_key, name = unlocked(state_of(run), who)
    return sign(private_key, release, decision, name), name


def unlocked(state: Path, who: str | None) -> tuple[Any, str]:
    """The approver's private key and the name under which this endpoint trusts it."""
    from tideforge.engine import release as keys

    path = keys.key_path()
    private_key = keys.load_key(path, passphrase(path))
    trusted = keys.read_approvers(state / "approvers.json")
    key = keys.key_id(keys.public_bytes(private_key))
    if key not in trusted:
        raise UserError(str(path), f"is not trusted in {state / 'approvers.json'}", "run `tideforge approver --add`")
    name = trusted[key][0]
    if who is not None and who != name:
        raise UserError("--who", f"your key stands for {name}", "leave --who out, or use another key")
    return private_key, name


def passphrase(path: Path, confirm: bool = False) -> str:
    given = os.environ.get("TIDEFORGE_PASSPHRASE")
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise UserError("passphrase", "is not given", "run this in a terminal, or set TIDEFORGE_PASSPHRASE")
    return str(click.prompt(f"passphrase of {path}", hide_input=True, confirmation_prompt=confirm, err=True))


def resume(run: Run, form: dict[str, Any]) -> bool:
    """Hands the form to the suspended flow run. False when none is suspended for this run. UserError when refused."""
    from tideforge.tasks.approve import state_of
    from tideforge.tasks.stack import Stack

    stack = Stack.read(state_of(run))
    api = stack.prefect_api if stack else os.environ.get("PREFECT_API_URL", "")
    flow_run = str(run.need("run").extra.get("flow_run", ""))
    if not api or not flow_run:
        return False
    return resume_by_api(api, flow_run, form)


def resume_by_api(api: str, flow_run: str, form: dict[str, Any]) -> bool:
    """Prefect answers a refused form with 200 and status REJECT, so the body is read."""
    import httpx

    from tideforge.flows.follow import patient

    try:
        seen = patient("GET", f"{api}/flow_runs/{flow_run}")
        if seen.status_code == 404 or (seen.json().get("state") or {}).get("type") != "PAUSED":
            return False
        answer = patient("POST", f"{api}/flow_runs/{flow_run}/resume", {"run_input": form})
        told = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        problem = f"does not answer ({type(error).__name__})"
        raise UserError(f"Prefect at {api}", problem, "run `tideforge up`, or mend PREFECT_API_URL") from None
    if answer.status_code >= 300 or told.get("status") != "ACCEPT":
        reason = (told.get("details") or {}).get("reason") or told.get("detail") or f"status {answer.status_code}"
        raise UserError(f"flow run {flow_run}", f"was not resumed ({reason})", "look at the run in Prefect's UI")
    return True


def _serving(state: Path) -> str:
    """Nonce of the release that serves; empty when the server is down or serves the first forward."""
    from tideforge.errors import TideforgeError
    from tideforge.tasks.live import version

    try:
        return str(version(state)["release"])
    except TideforgeError as error:
        click.echo(f"which one serves is unknown: {error}", err=True)
        return ""
