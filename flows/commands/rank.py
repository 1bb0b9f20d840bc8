"""`tideforge rank`: the cost model alone, from a plain install without torch."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tideforge.costmodel.folds import FOLDS, FOLDS_HELP
from tideforge.errors import UserError
from tideforge.flows.commands.options import Finite

if TYPE_CHECKING:
    from rich.console import Console

    from tideforge.costmodel.predict import Traffic
    from tideforge.costmodel.rank import Question, Ranked, Ranking


@click.command()
@click.option(
    "--endpoint", "endpoint_file", type=click.Path(path_type=Path), help="Endpoint file: everything from there."
)
@click.option("--launch", "launch_text", help="Server launch command: vllm, sglang, trtllm-serve or tideforge.")
@click.option(
    "--config", "--model", "model", help="config.json, its folder, or a known model; else the command's model."
)
@click.option("--hardware", "hardware_name", help="Accelerator of data/hardware.json, or a JSON file like it.")
@click.option(
    "--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Accelerators, all nodes together."
)
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--log", "logs", multiple=True, help="Traffic log (file, folder, glob); several are allowed.")
@click.option("--prompt-tokens", type=Finite(min=1), default=1024, show_default=True, help="Mean, without --log.")
@click.option("--output-tokens", type=Finite(min=1), default=256, show_default=True, help="Mean, without --log.")
@click.option("--users", type=Finite(min=0, min_open=True), help="Requests in flight; 64, or what the log has.")
@click.option("--maximize", type=click.Choice(["output_tps", "tps_per_user_p90", "ttft", "cost"]), default="output_tps")
@click.option("--ttft-limit-ms", type=Finite(min=0, min_open=True))
@click.option("--tpot-limit-ms", type=Finite(min=0, min_open=True))
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Layouts in the table.")
@click.option(
    "--explain",
    is_flag=True,
    help="Also where the winner changes with the load, what longer prompts do, and the Pareto front.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print everything as JSON: all layouts, terms with tags, reasons."
)
def rank(
    endpoint_file: Path | None,
    launch_text: str | None,
    model: str | None,
    hardware_name: str | None,
    gpus: int,
    nodes: int,
    logs: tuple[str, ...],
    prompt_tokens: float,
    output_tokens: float,
    users: float | None,
    maximize: str,
    ttft_limit_ms: float | None,
    tpot_limit_ms: float | None,
    top: int,
    explain: bool,
    as_json: bool,
) -> None:
    """Rank parallel layouts for a model, hardware and traffic.

    Every legal layout with predicted tokens/s, memory and launch command, every other with its reason. The prediction is
    a sum of terms: each says whether it is measured, fitted, from a spec sheet or guessed, and layouts that
    the model cannot tell apart are shown as ties.

    \b
    tideforge rank --endpoint deployments/endpoints/smollm2-cpu.yaml
    tideforge rank --launch 'vllm serve Qwen/Qwen3-235B-A22B -tp 8' --hardware h200-sxm --gpus 8
    tideforge rank --launch 'vllm serve m' --config m/config.json --hardware b200 --gpus 16 --nodes 2 --log 'logs/*.parquet'
    """
    from tideforge.costmodel import rank as ranking
    from tideforge.costmodel.explain import explained, lines
    from tideforge.costmodel.misspelt import not_understood
    from tideforge.costmodel.question import question

    if bool(endpoint_file) == bool(launch_text):
        remedy = "give --endpoint FILE or --launch '...'"
        raise UserError("rank", "needs either an endpoint or a launch command", remedy)
    if endpoint_file:
        asked = _of_endpoint(endpoint_file, logs, users)
    else:
        if hardware_name is None:
            raise UserError("--hardware", "is missing", "name the accelerator, e.g. --hardware h200-sxm")
        traffic = _of_logs(logs, users) if logs else _given(prompt_tokens, output_tokens, users or 64.0)
        command = launch_text or ""
        limits = (ttft_limit_ms, tpot_limit_ms)
        asked = question(command, model, hardware_name, gpus, nodes, traffic, maximize, *limits)
    answer = ranking.rank(asked)
    unread = not_understood(asked.command)
    for name, near in unread.items():
        click.echo(f"tideforge: unknown flag {name}, did you mean {near}?", err=True)
    why = explained(answer) if explain else None
    if as_json:
        more = {"explained": dataclasses.asdict(why)} if why else {}
        click.echo(json.dumps({**ranking.to_dict(answer), **more}))
        return
    _show(answer, top)
    for line in lines(why) if why else ():
        click.echo(line)
    if unread:
        click.echo(f"not understood in the launch command, and kept as they are: {', '.join(unread)}")


def _given(prompt_tokens: float, output_tokens: float, users: float) -> Traffic:
    from tideforge.costmodel.predict import Traffic

    return Traffic(prompt_tokens, output_tokens, users)


def _of_logs(logs: tuple[str, ...], users: float | None) -> Traffic:
    from tideforge.data.profile import profile_logs
    from tideforge.tasks.rank import traffic_of

    traffic = traffic_of(profile_logs(logs))
    return dataclasses.replace(traffic, users=users) if users else traffic


def _of_endpoint(endpoint_file: Path, logs: tuple[str, ...], users: float | None) -> Question:
    from tideforge.tasks.endpoint import Endpoint
    from tideforge.tasks.rank import endpoint_question

    endpoint = Endpoint.load(endpoint_file)
    chosen = logs or tuple(endpoint.traffic.logs)
    if not chosen:
        raise UserError(f"{endpoint_file}: traffic.logs", "is empty", "name traffic logs there or give --log")
    return endpoint_question(endpoint, _of_logs(chosen, users))


def _show(answer: Ranking, top: int) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, 140))  # a cut figure says nothing
    q, p = answer.question, answer.precision
    many = f"{q.gpus} x {q.hardware.full_name}" + (f" on {q.nodes} nodes" if q.nodes > 1 else "")
    console.print(f"{q.shape.name} ({q.command.engine}) on {many}", style="bold")
    load = f"{q.traffic.prompt_tokens:.0f} tokens in, {q.traffic.output_tokens:.0f} out, {q.traffic.users:.0f} users"
    console.print(f"{load} ({q.traffic.source}); weights {p.common}, experts {p.experts}, KV {p.kv}; {q.maximize}")
    if answer.ranked:
        _table(console, answer, top)
        _commands(answer.ranked[: min(top, 3)])
    else:
        console.print("no layout is legal:", style="bold red")
    _rejected(answer)
    for note in answer.notes:
        console.print(f"note: {note}", markup=False)


def _table(console: Console, answer: Ranking, top: int) -> None:
    """The first layouts and, wherever it stands, the one that runs now. `=`: tied with the first, `!`: breaks a limit."""
    from rich.table import Table

    from tideforge.costmodel.coefficients import TYPICAL_ERROR

    names = ("", "layout", "tok/s", "per GPU", "per user", "TTFT ms", "TPOT ms", "fit", "GiB", "binding term")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in ("layout", "binding term") else "right")
    for position, entry in enumerate(answer.ranked, start=1):
        if position <= top or entry.current:
            table.add_row(*_row(position, entry))
    console.print(table)
    shown = min(top, len(answer.ranked))
    console.print(
        f"the first {shown} of {len(answer.ranked)} legal layouts; half of all predicted tok/s are off by more than "
        f"{TYPICAL_ERROR:.0%} (measured on GPUs, docs/log.md)\n"
        "fit: users whose KV cache fits; GiB: of one GPU before the KV cache; = tied with the first",
        style="dim",
    )


def _row(position: int, entry: Ranked) -> list[str]:
    p = entry.prediction
    place = f"{'= ' if entry.tied and position > 1 else ''}{position}"
    binding = f"{p.binding.name} ({p.binding.tag}, {p.binding.seconds / p.request_s:.0%})"
    memory = (p.memory.weight_bytes + p.memory.activation_bytes + p.memory.reserve_bytes) / 2**30
    figures = (p.output_tokens_per_s, p.output_tokens_per_s_per_gpu, p.tokens_per_s_per_user, p.ttft_ms, p.tpot_ms)
    shown = [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in figures]
    name = str(entry.layout) + (" (now)" if entry.current else "") + (" !" if entry.broken else "")
    return [place, name, *shown, f"{p.slots:,.0f}", f"{memory:.1f}", binding]


def _commands(entries: tuple[Ranked, ...]) -> None:
    for position, entry in enumerate(entries, start=1):
        click.echo(f"{position}. {entry.command}")
        for line in (*entry.instructions, *entry.broken):
            click.echo(f"   {line}")


def _rejected(answer: Ranking) -> None:
    kinds = Counter(entry.kind for entry in answer.rejected)
    for kind, count in kinds.most_common():
        example = next(entry for entry in answer.rejected if entry.kind == kind)
        click.echo(f"refused, {kind}: {count}, e.g. {example.layout}: {example.reason}")
    for entry in answer.rejected:
        if entry.current:
            click.echo(f"the launch command's own layout {entry.layout} is refused: {entry.reason}")


@click.command("evaluate-ranking")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--folds", type=click.Choice(FOLDS), help=FOLDS_HELP)
@click.option("--json", "as_json", is_flag=True, help="Only the last line.")
def evaluate_ranking(file: Path, folds: str | None, as_json: bool) -> None:
    """Score the cost model against measured layouts: a CSV with one row a layout, in groups of the same traffic.

    Near: the pick is within 5 % of the best measured layout. The last line is JSON.

    \b
    tideforge evaluate-ranking measured.csv --folds family
    """
    from tideforge.costmodel.evaluate import run

    run(file, folds, as_json)
