"""Regenerates the figures in README.md from the raw records in docs/records/.

python docs/figures.py                     rewrite README.md
python docs/figures.py --check             exit 1 if README.md is not what the records say
python docs/figures.py --add NAME REPORT   keep the last line of REPORT (a command's output) as a record, with
                                           commit, machine and time
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS, README = ROOT / "docs" / "records", ROOT / "README.md"
BLOCKS = ("figures", "gpu")  # README has <!-- NAME --> and <!-- /NAME --> around what is written here


def add(name: str, report: Path) -> None:
    """Writes docs/records/NAME.json."""
    figures = json.loads(report.read_text().strip().splitlines()[-1])
    with open("/proc/cpuinfo") as file:
        cpu = next(
            (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine()
        )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cores = os.cpu_count()
    record = {"commit": commit.strip(), "cpu": cpu, "cores": cores, "kernel": platform.release(), "time": when}
    (RECORDS / f"{name}.json").write_text(
        json.dumps({"record": record, "figures": figures}, indent=1, sort_keys=True) + "\n"
    )


def table() -> str:
    """The table of the demo's record, as Markdown."""
    raw = json.loads((RECORDS / "demo.json").read_text())
    record, f = raw["record"], raw["figures"]
    outcomes = ", ".join(f"{count} {name}" for name, count in f["outcomes"].items())
    rows = [
        ("gain of the source alone, held-out requests", f"{f['best_ratio']:.2f} times [{f['ci_low']:.2f}, {f['ci_high']:.2f}], "
         f"{f['held_out_pairs']} pairs; 16 users, 48 tokens out"),
        ("output tokens/s, incumbent and winner", f"{f['incumbent_tps']:.1f} and {f['finalist_tps']:.1f}"),
        ("over HTTP on the live server, flipped A B B A", f"{f['http_tps_before']:.1f} and {f['http_tps_after']:.1f}; "
         f"{f['failed_requests']} failed requests"),
        ("candidates in the search", f"{f['candidates']} in {f['search_s']:.0f} s ({outcomes})"),
        ("service starts, weight loads", f"{f['service_starts']}, {f['weight_loads']}"),
        ("engine idle while candidates waited", f"{f['idle_s_while_queued']:.2f} s"),
        ("the incumbent's one-user decode beside transformers'", _beside(f)),
        ("whole night, from the start of the run to the report (servers start before)", f"{f['wall_s'] / 60:.1f} minutes"),
    ]  # fmt: skip
    head = (
        f"`make demo APPROVE=yes` on {record['cores']} cores of {record['cpu']}, {record['time'][:10]}, commit "
        f"{record['commit'][:10]} (raw: `docs/records/demo.json`; this table: `python docs/figures.py`):"
    )
    return "\n".join([head, "", "| what | seen |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _beside(f: dict[str, Any]) -> str:
    if f["incumbent_vs_transformers"] is None:
        return "not measured"
    return (
        f"{f['incumbent_vs_transformers']:.2f} times (rounds {f['incumbent_vs_transformers_low']:.2f} to "
        f"{f['incumbent_vs_transformers_high']:.2f}); {f['incumbent_decode_ms']:.0f} ms a token, of which the linear layers "
        f"alone {f['linear_floor_ms']:.0f} ms"
    )


def gpu_table() -> str:
    """What the engine's benchmark saw on a GPU, as Markdown: every figure that has a goal."""
    parts: dict[str, Any] = json.loads((RECORDS / "engine_h200.json").read_text())["figures"]
    calls = [call for part in parts.values() for call in part["environment"]]
    gpu, driver = calls[0]["gpu"]["name"], calls[0]["gpu"]["driver_version"]
    commits, days = (sorted({call[name][:10] for call in calls}) for name in ("commit", "time"))
    rows = [
        (f"{name}: {one['name']}", _with_unit(one), one["prediction"], one["goal"] + _verdict(one))
        for name, part in parts.items() for one in part["figures"] if one["goal"]
    ]  # fmt: skip
    head = (
        f"`make bench-engine` on {gpu}s, a part a GPU, driver {driver}, torch {calls[0]['torch']}, {', '.join(days)}, commit "
        f"{', '.join(commits)}; every figure that has a goal (all of them and their circumstances: `docs/records/engine_h200.json`):"
    )
    names = ("what", "seen", "predicted", "goal")
    lines = ["| " + " | ".join(row) + " |" for row in (names, ("---",) * len(names), *rows)]
    return "\n".join([head, "", *lines])


MET = {True: ", met", False: ", **missed**", None: ""}


def _verdict(figure: dict[str, Any]) -> str:
    """Whether the goal was met; a bound that is neither met nor missed was read too seldom, or with too much noise."""
    if figure["met"] is None and figure["value"] is not None and figure["goal"][:2] in ("<=", ">="):
        return ", too few readings to say"
    return MET[figure["met"]]


def _with_unit(figure: dict[str, Any]) -> str:
    value = figure["value"]
    if value is None:
        return "not measured"
    if not isinstance(value, str):
        value = f"{value:,.0f}" if abs(value) >= 100 or isinstance(value, int) else f"{value:.3g}"
    return f"{value} {figure['unit']}".strip()


def rendered(text: str) -> str:
    for name, made in zip(BLOCKS, (table(), gpu_table()), strict=True):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", nargs=2, metavar=("NAME", "REPORT"))
    args = parser.parse_args()
    if args.add:
        add(args.add[0], Path(args.add[1]))
    new = rendered(README.read_text())
    if args.check:
        sys.exit(
            0 if new == README.read_text() else "README.md does not show what docs/records says: run docs/figures.py"
        )
    README.write_text(new)


if __name__ == "__main__":
    main()
