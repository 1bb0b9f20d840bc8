"""`tideforge verify`: the gates of verification alone, on one forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tideforge.flows.commands.options import STATE, load

if TYPE_CHECKING:
    from rich.console import Console

    from tideforge.tasks.verify.verdict import GateResult, Verdict


@click.command()
@click.argument("forward")
@click.option(
    "--endpoint", "endpoint_file", type=click.Path(path_type=Path), required=True, help="endpoint file (YAML)"
)
@STATE
@click.option("--against", help="folder or id of the forward beside it; what serves, or would, if absent")
@click.option("--gates", help="names, with commas between; all if absent")
@click.option(
    "--pairs", type=click.IntRange(min=0), default=0, show_default=True, help="held-out pairs of timed blocks as well"
)
@click.option("--json", "as_json", is_flag=True, help="print the verdict as one JSON object on one line")
def verify(
    forward: str,
    endpoint_file: Path,
    state: Path | None,
    against: str | None,
    gates: str | None,
    pairs: int,
    as_json: bool,
) -> None:
    """Run the gates of verification on FORWARD, a folder or the id of one in the state folder.

    Exit code 0: every gate that was asked passed. 1: one did not; the report says which request, token and layer, what was
    expected and what came. 2: bad input. Pairs show the gain on held-out requests and check those answers; the gain does
    not decide the exit code. Nothing is written into the archive of any night.

    \b
    tideforge verify ./candidate --endpoint my.yaml
    tideforge verify 3f2a9c --endpoint my.yaml --gates written_kv,quality
    tideforge verify ./candidate --endpoint my.yaml --pairs 8 --json
    """
    from tideforge.errors import UserError
    from tideforge.tasks.verify.alone import Question, verify_alone

    chosen = [name.strip() for name in (gates or "").split(",") if name.strip()]
    if gates is not None and not chosen:
        raise UserError("--gates", "names no gate", "name some, or leave it out for all")
    question = Question.of(load(endpoint_file, state), forward, against, chosen, pairs)
    verdict = verify_alone(question, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps({**verdict.to_dict(), "passed": verdict.clean}, sort_keys=True))
    else:
        show(verdict)
    if not verdict.clean:
        raise SystemExit(1)


def show(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table("gate", "", "seconds", "figures", title=f"forward {verdict.forward[:12]}")
    for gate in verdict.gates:
        table.add_row(gate.name, outcome(gate), f"{gate.seconds:.1f}", figures(gate))
    console.print(table)
    for gate in verdict.gates:
        if not gate.passed:
            console.print(f"{gate.name}: {gate.evidence}", style="red", markup=False)
    _rest(console, verdict)


def figures(gate: GateResult) -> str:
    """Those of one number; `--json` has all."""
    single = {name: value for name, value in gate.figures.items() if isinstance(value, int | float)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in single.items()
    )


def outcome(gate: GateResult) -> str:
    return "not verified" if gate.unverified else "passed" if gate.passed else "FAILED"


def _rest(console: Console, verdict: Verdict) -> None:
    """Flags, gain, and the last line: passed, failed or not verified."""
    for flag in verdict.flags:
        console.print(f"look at: {flag}", style="red", markup=False)
    if len(verdict.pairs) > 1:
        interval = f"[{verdict.ci_low:.3f}, {verdict.ci_high:.3f}]"
        console.print(
            f"{verdict.ratio:.3f} {interval} times the other, {len(verdict.pairs)} held-out pairs", markup=False
        )
    failed = [gate.name for gate in verdict.gates if not gate.passed]
    seconds = sum(gate.seconds for gate in verdict.gates)
    said = f"failed: {', '.join(failed)}" if failed else verdict.unverified or "passed"
    console.print(f"{said} ({len(verdict.gates)} gates, {seconds:.1f} s)", style="bold", markup=False)
