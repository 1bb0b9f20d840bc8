"""`tideforge ingest` and `tideforge profile` (show and diff: profiles.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tideforge.errors import UserError
from tideforge.flows.commands.options import STATE, Finite, load

if TYPE_CHECKING:
    from tideforge.data.profile_records import Cells, Group, Profile
    from tideforge.tasks.endpoint import Endpoint
    from tideforge.tasks.store import Run

LOGS_HELP = (
    "LOGS are files, folders or globs, also s3://; `sample:azure_conv_2023` is a trace that comes with the package."
)
endpoint_option = click.option("--endpoint", "endpoint_file", type=click.Path(path_type=Path), help="Endpoint file.")
run_option = click.option("--run", "run_id", help="Run of that endpoint; it is made when it is not there.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def node_run(
    endpoint_file: Path | None, state: Path | None, run_id: str | None, logs: tuple[str, ...]
) -> tuple[Run, Endpoint] | None:
    """The run to work on, or None when LOGS are given instead. UserError unless it is exactly one of the two."""
    from tideforge.tasks.store import Run

    if bool(logs) == bool(endpoint_file):
        raise UserError("LOGS", "give either logs or an endpoint", "name logs, or --endpoint FILE --run RUN")
    if endpoint_file is None:
        return None
    if run_id is None:
        raise UserError("--run", "is missing", "name the run with --run RUN")
    endpoint = load(endpoint_file, state)
    root = endpoint.state / "runs"
    return (Run.open if (root / run_id).is_dir() else Run.create)(root, run_id), endpoint


@click.command(epilog=LOGS_HELP)
@click.argument("logs", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the Parquet files.")
@click.option("--format", "formats", multiple=True, help="Mapping file or name of a format, instead of looking.")
@endpoint_option
@STATE
@run_option
@json_option
def ingest(
    logs: tuple[str, ...],
    out: Path | None,
    formats: tuple[str, ...],
    endpoint_file: Path | None,
    state: Path | None,
    run_id: str | None,
    as_json: bool,
) -> None:
    """Check traffic logs against the schema and store them as Parquet.

    A row that cannot be a finished request goes to the quarantine file with its reason; a request id that came before
    is dropped and counted. With --endpoint and --run this is the node `ingest` of that run.

    \b
    tideforge ingest sample:azure_conv_2023
    tideforge ingest 'logs/*.parquet' --out checked/
    tideforge ingest s3://bucket/logs --format my-format.yaml
    tideforge ingest --endpoint deployments/endpoints/smollm2-cpu.yaml --run 2026-11-30
    """
    from tideforge.data.logs import find_logs
    from tideforge.data.mapping import chosen_formats
    from tideforge.data.readers import IngestReport, read_logs
    from tideforge.tasks import ingest as node
    from tideforge.tasks.store import Run

    chosen = node_run(endpoint_file, state, run_id, logs)
    if chosen and formats:
        raise UserError("--format", "does not go with --endpoint", "name formats in the endpoint's traffic.formats")
    if chosen:
        run, endpoint = chosen
        report = IngestReport.model_validate(run.read_json(node.ingest(run, endpoint), "report"))
    else:
        reading = read_logs(find_logs(logs), chosen_formats(formats))
        report = reading.report
        if out:
            out.mkdir(parents=True, exist_ok=True)
            node.write_reading(Run(out), reading)
    click.echo(report.model_dump_json() if as_json else "\n".join(report.lines()))


class ProfileCommand(click.Command):
    """`profile LOGS`, or one of its own commands where that is the first word (a log of that name: ./show)."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        from tideforge.flows.commands import profiles

        below = {"show": profiles.show, "diff": profiles.diff}
        if args and args[0] in below:
            return below[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=ProfileCommand, epilog=LOGS_HELP)
@click.argument("logs", nargs=-1)
@click.option("--format", "formats", multiple=True, help="Mapping file or name of a format, instead of looking.")
@click.option(
    "--days",
    "days_folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep there what was read, day by day: only new files are read then, and quantiles are within 1 %.",
)
@click.option("--last-hours", type=Finite(min=0, min_open=True), help="Hours before the newest arrival.")
@endpoint_option
@STATE
@run_option
@json_option
def profile(
    logs: tuple[str, ...],
    formats: tuple[str, ...],
    days_folder: Path | None,
    last_hours: float | None,
    endpoint_file: Path | None,
    state: Path | None,
    run_id: str | None,
    as_json: bool,
) -> None:
    """Make or show the profile of a traffic log: lengths, arrivals, concurrency, by region, model and hour.

    A profile holds aggregates only, never text, and its id is the hash of its content. With --endpoint and --run this
    is the node `profile` of that run.

    \b
    tideforge profile sample:azure_conv_2023
    tideforge profile logs/ --last-hours 1 --json
    tideforge profile logs/ --days kept/
    tideforge profile show FILE|LOG [--html PAGE]
    tideforge profile diff BEFORE AFTER
    """
    from tideforge.data.mapping import chosen_formats
    from tideforge.data.profile import profile_logs
    from tideforge.tasks import profile as node

    chosen = node_run(endpoint_file, state, run_id, logs)
    if chosen and last_hours:
        raise UserError("--last-hours", "does not go with --run", "leave one of them out")
    if chosen and formats:
        raise UserError("--format", "does not go with --endpoint", "name formats in the endpoint's traffic.formats")
    if days_folder and (chosen or last_hours):
        raise UserError("--days", "goes with LOGS alone", "leave --endpoint and --last-hours out")
    if days_folder:
        made = profile_by_day(days_folder, logs, formats)
    elif chosen:
        node.profile(*chosen)
        made = node.read_profile(chosen[0])
    else:
        made = profile_logs(logs, last_hours, chosen_formats(formats))
    if as_json:
        click.echo(as_json_text(made))
    else:
        show(made)


def profile_by_day(folder: Path, logs: tuple[str, ...], formats: tuple[str, ...]) -> Profile:
    from tideforge.data.days import Days
    from tideforge.data.logs import find_logs
    from tideforge.data.mapping import chosen_formats
    from tideforge.data.merge import profile_days

    days = Days(folder)
    days.take(find_logs(logs), chosen_formats(formats), lambda line: click.echo(line, err=True))
    return profile_days(days)


def as_json_text(made: Profile) -> str:
    return json.dumps({"sha256": made.sha256, **json.loads(made.to_json())}, sort_keys=True)


def show(made: Profile) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"profile {made.sha256[:16]}: {made.requests} requests in {made.span_s:.0f} s", markup=False)
    console.print(lengths_table(made))
    console.print("prompt tokens\n" + histogram(made.joint, 0), markup=False)
    console.print("output tokens\n" + histogram(made.joint, 1), markup=False)
    for title, groups in (
        ("region", made.regions),
        ("model", made.models),
        ("tenant", made.by_tenant),
        ("hour (UTC)", made.hours),
    ):
        if groups:
            console.print(groups_table(title, groups))
    console.print(load_text(made), markup=False)


def lengths_table(made: Profile) -> object:
    from rich.table import Table

    names = ("p50", "p90", "p99", "p99.9")
    table = Table("tokens", "least", "mean", *names, "most")
    kinds = {"prompt": made.prompt, "output": made.output, "context": made.context, "cached": made.cached}
    for kind, lengths in kinds.items():
        if lengths is None:
            continue
        quantiles = [str(lengths.quantiles[name]) for name in names]
        table.add_row(kind, str(lengths.least), f"{lengths.mean:.1f}", *quantiles, str(lengths.most))
    return table


def groups_table(title: str, groups: dict[str, Group]) -> object:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title, "requests", "prompt p50", "prompt p90", "output p50", "output p90")
    for name, group in groups.items():
        figures = (group.requests, group.prompt_p50, group.prompt_p90, group.output_p50, group.output_p90)
        table.add_row(escape(name), *map(str, figures))
    return table


def histogram(cells: Cells, axis: int, width: int = 50) -> str:
    """A line an octave; `axis` 0 is the prompt, 1 the output."""
    from tideforge.data.profile_records import BINS_PER_OCTAVE

    octaves: dict[int, int] = {}
    for cell in cells:
        octave = cell[axis] // BINS_PER_OCTAVE
        octaves[octave] = octaves.get(octave, 0) + cell[2]
    top = max(octaves.values())
    lines = []
    for octave in range(min(octaves), max(octaves) + 1):
        number = octaves.get(octave, 0)
        lines.append(f"{2**octave:>8}- {'█' * round(width * number / top)} {number}")
    return "\n".join(lines)


def load_text(made: Profile) -> str:
    arrivals, flight = made.arrivals, made.concurrency
    lines = [
        f"arrivals: {arrivals.mean_per_s:.3g}/s; a minute p50 {arrivals.per_minute['p50']}, "
        f"p99 {arrivals.per_minute['p99']}, most {arrivals.per_minute['most']}",
        f"in flight: mean {flight.mean:.1f}, p50 {flight.p50}, p99 {flight.p99}, most {flight.most}",
    ]
    if arrivals.dispersion is not None and arrivals.gap_cv is not None:
        lines.append(f"burstiness: dispersion {arrivals.dispersion:.2f}, gap CV {arrivals.gap_cv:.2f} (Poisson: 1, 1)")
    if flight.measured_requests < made.requests:
        lines.append(f"  {made.requests - flight.measured_requests} without a latency: {flight.rule}")
    return "\n".join(lines)
