"""`tideforge profile show` and `tideforge profile diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tideforge.errors import UserError
from tideforge.flows.commands.options import Finite

if TYPE_CHECKING:
    from tideforge.data.profile_diff import Difference, Moved
    from tideforge.data.profile_records import Profile

SHADES = " ░▒▓█"
FILE_HELP = (
    "A profile is a JSON file, as `tideforge profile LOGS --json` prints it or a run keeps it; or else a traffic log."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def load_profile(name: str) -> Profile:
    """A profile's file, or the profile of a log of that name."""
    from tideforge.data.profile import profile_logs
    from tideforge.data.profile_records import Profile

    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return profile_logs([name])
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return profile_logs([name])
    if not isinstance(value, dict) or "joint" not in value:
        return profile_logs([name])
    value.pop("sha256", None)  # what --json prints beside the content
    return Profile.from_json(json.dumps(value), name)


@click.command(epilog=FILE_HELP)
@click.argument("profile")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write one page that fetches nothing.")
@json_option
def show(profile: str, html: Path | None, as_json: bool) -> None:
    """Show a profile: tables and plots here, or one HTML page.

    \b
    tideforge profile show profile.json
    tideforge profile show sample:azure_conv_2023 --html profile.html
    """
    from tideforge.flows.commands import traffic

    made = load_profile(profile)
    if html:
        from tideforge.data.files import write_whole
        from tideforge.data.profile_html import page

        if not html.parent.is_dir():
            raise UserError(str(html.parent), "is no folder", "name a file in a folder that exists")
        write_whole(html, page(made).encode())
    if as_json:
        click.echo(traffic.as_json_text(made))
    else:
        traffic.show(made)
        click.echo(heatmap(made))
        click.echo(day_plot(made))


@click.command(epilog=FILE_HELP)
@click.argument("before")
@click.argument("after")
@click.option("--least", type=Finite(min=0), default=0.05, show_default=True, help="Smallest change to show.")
@json_option
def diff(before: str, after: str, least: float, as_json: bool) -> None:
    """Say which figures of a profile moved, by how much, and how far apart the distributions are.

    \b
    tideforge profile diff yesterday.json today.json --least 0.1
    """
    from tideforge.data.profile_diff import difference

    found = difference(load_profile(before), load_profile(after), least)
    click.echo(json.dumps(found.to_dict(), sort_keys=True) if as_json else "\n".join(diff_lines(found)))


def diff_lines(found: Difference) -> list[str]:
    if found.before == found.after:
        return ["the profiles are the same"]
    lines = [f"{'KS ' + name:<16} {distance:.3f}" for name, distance in found.ks.items()]
    lines.append(f"{'joint':<16} {found.joint:.3f} (total variation, bins of an octave)")
    width = max((len(each.name) for each in found.moved), default=0)
    return lines + [f"{each.name:<{width}} {moved_text(each)}" for each in found.moved]


def moved_text(each: Moved) -> str:
    before, after = ("-" if value is None else f"{value:.6g}" for value in (each.before, each.after))
    change = "" if each.change is None else f"  {each.change:+.1%}"
    return f"{before:>12} -> {after:>12}{change}"


def heatmap(made: Profile) -> str:
    """Prompt across and output up, a character an octave."""
    from tideforge.data.drift import coarse

    cells = coarse(made.joint)
    top = max(cells.values())
    columns = range(min(x for x, _ in cells), max(x for x, _ in cells) + 1)
    lines = ["output (up) by prompt (across, from " + f"{2 ** columns[0]} tokens, an octave a column)"]
    for y in range(max(y for _, y in cells), min(y for _, y in cells) - 1, -1):
        shades = "".join(2 * shade(cells.get((x, y), 0), top) for x in columns)
        lines.append(f"{2**y:>8}- {shades}".rstrip())
    return "\n".join(lines)


def shade(number: int, top: int) -> str:
    """By the root, so that what is rare still shows."""
    return SHADES[min(len(SHADES) - 1, -int(-((number / top) ** 0.5) * (len(SHADES) - 1) // 1))]


def day_plot(made: Profile, width: int = 40) -> str:
    top = max((each.in_flight_mean for each in made.day.values()), default=0.0) or 1.0
    lines = ["in flight and decoding by hour (UTC)"]
    for hour, each in made.day.items():
        bar = "█" * round(width * each.in_flight_mean / top)
        lines.append(f"{hour:>8}- {bar} {each.in_flight_mean:.1f} ({each.decoding_mean:.1f} decoding)")
    return "\n".join(lines)
