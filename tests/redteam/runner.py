"""`python -m tests.redteam.runner`: every cheat must be caught, every honest forward must pass.

Each goes through a trial and a verification as any candidate does, with imports unscreened, names changed, docstrings and
comments removed. It runs in a copy of the source, because some cheats edit what they find. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tideforge.engine.forward import Forward

from .ring import ROOT, Ring, Tried, model_for_double
from .roster import FOLDERS, Entry, entries, fits, winners

SETS = {"cheats": ("cheats",), "honest": ("honest",), "unseen": ("unseen-cheats", "unseen-honest")}
COPIED = ("costmodel", "data", "engine", "flows", "tasks", "tests", "tideforge")
COPY = "REDTEAM_COPY"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `ok`: a cheat that was caught, an honest forward that passed."""

    name: str
    set: str
    ok: bool
    by: str
    why: str
    seconds: float
    plausible: bool | None
    unseen_gain: float = 0.0  # up to which a gain would not have been beyond doubt; 0 where none was looked for


def judged(entry: Entry, tried: Tried) -> Row:
    by, why = verdict(entry, tried)
    seen = "provenance" in tried.failed  # what was changed is then told, and put right
    caught = bool(by) and not (entry.contained and tried.harmed and not seen)
    ok = not by and not tried.harmed if entry.honest else caught
    return Row(
        entry.name,
        entry.set,
        ok,
        by or ("passed" if entry.honest else "MISSED"),
        why,
        tried.seconds,
        tried.plausible,
        tried.doubt,
    )


def verdict(entry: Entry, tried: Tried) -> tuple[str, str]:
    """What stopped a forward, and its evidence; "" when nothing did."""
    if tried.outcome != "passed":
        return f"outcome {tried.outcome}", tried.message
    if tried.failed:
        return ", ".join(f"gate {name}" for name in tried.failed), next(iter(tried.failed.values()))
    told = (
        f"by the clock {tried.wall.ratio:.3f}, at least {tried.wall.low:.3f}; by work {tried.work.ratio:.3f}, "
        f"at least {tried.work.low:.3f}" if tried.wall.pairs else ""
    ) + "".join(f"; {one}" for one in tried.harmed)  # fmt: skip
    if entry.contained and tried.wall.pairs and not tried.gained:
        return ("", told) if tried.harmed else ("no gain", told)
    return "", told


def chosen(args: argparse.Namespace) -> list[Entry]:
    """What to try, without the winners that need a raw forward."""
    sets = SETS[args.set] if args.set else tuple(FOLDERS)
    found = entries(sets)
    if "honest" in sets:
        for architecture in ("llama", "moe", "deepseek"):
            found += winners(Forward.load(model_for_double(architecture)), architecture)
    if args.only:
        found = [entry for entry in found if named(entry.name, args)]
    found = sorted((entry for entry in found if fits(entry, args.device)), key=lambda entry: entry.kind)
    cuts = [len(found) * part // args.parts for part in (args.part, args.part + 1)]
    return found[slice(*cuts)]  # neighbours are tried in one ring


def named(name: str, args: argparse.Namespace) -> bool:
    return name in args.only if args.exact else any(part in name for part in args.only)


def rows(found: Sequence[Entry], args: argparse.Namespace) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        rings: dict[tuple[str, str], Ring] = {}
        for entry in found:
            ring = rings.get(entry.kind)
            if ring is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ring-")))
                ring = rings[entry.kind] = Ring(*entry.kind, folder, args.device, args.quick)
                stack.callback(ring.close)
            forward = entry.forward(
                ring.bench.incumbent, ring.plain, None if args.plain_names else args.seed, ring.bench.lab.weights_bytes
            )
            tried = ring.tried(forward, args.thorough or entry.honest, timed=entry.contained)
            yield judged(entry, tried)


def summary(found: Sequence[Row], skipped: Sequence[str]) -> dict[str, Any]:
    seen = [row for row in found if not row.set.startswith("unseen")]
    unseen = [row for row in found if row.set.startswith("unseen")]
    return {**counted(seen), "unseen": counted(unseen), "skipped": list(skipped)}


def counted(found: Sequence[Row]) -> dict[str, Any]:
    cheats = [row for row in found if row.set.endswith("cheats")]
    honest = [row for row in found if row.set.endswith("honest")]
    return {
        "cheats": len(cheats), "caught": sum(row.ok for row in cheats), "missed": sum(not row.ok for row in cheats),
        "honest": len(honest), "falsely_rejected": sum(not row.ok for row in honest),
        "wrong": [row.name for row in found if not row.ok],
        "implausible": [row.name for row in cheats if row.plausible is False],
        "gains_unseen_below": round(max((row.unseen_gain for row in found), default=0.0), 3),
        "median_s": round(statistics.median([row.seconds for row in found]), 2) if found else None,
    }  # fmt: skip


def line(row: Row) -> str:
    mark = "ok " if row.ok else "BAD"
    return f"{mark} {row.set:14} {row.name:40} {row.seconds:6.1f} s  {row.by:36} {row.why[:110]}"


def in_a_copy(argv: Sequence[str]) -> int:
    """The same command in a copy of the source, with nothing of the checkout on its path."""
    with tempfile.TemporaryDirectory(prefix="redteam-") as folder:
        for name in COPIED:
            shutil.copytree(
                ROOT / name, Path(folder) / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        others = [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT
        ]
        environment = {**os.environ, COPY: "1", "PYTHONPATH": os.pathsep.join((folder, *others))}
        command = [sys.executable, "-P", "-m", "tests.redteam.runner", *argv]
        return subprocess.run(command, cwd=folder, env=environment).returncode


def together(args: argparse.Namespace) -> list[Row]:
    """`--jobs`: parts of the list in processes of their own; a part says its rows as JSON lines."""
    command = [sys.executable, "-P", "-m", "tests.redteam.runner", *sys.argv[1:], "--parts", str(args.jobs), "--part"]
    parts = [
        subprocess.Popen([*command, str(part)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for part in range(args.jobs)
    ]
    outputs = [part.communicate()[0] for part in parts]
    found = [
        Row(**json.loads(text)) for output in outputs for text in output.splitlines() if text.startswith('{"name"')
    ]
    if len(found) != (wanted := len(chosen(args))):
        raise SystemExit(f"only {len(found)} of {wanted} forwards were tried: a part has ended early")
    return found


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="cheats must be caught, honest forwards must pass")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of them")
    parser.add_argument("--exact", action="store_true", help="--only gives whole names")
    parser.add_argument("--set", choices=SETS)
    parser.add_argument("--json", action="store_true", help="the last line only")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without the gate that times, for tests")
    parser.add_argument("--seed", type=int, default=0, help="of the new names")
    parser.add_argument("--plain-names", action="store_true", help="names as they are, to debug one")
    parser.add_argument("--thorough", action="store_true", help="all gates, though one has caught it")
    parser.add_argument("--parts", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parsed(argv)
    if COPY not in os.environ:
        return in_a_copy(argv)
    if args.jobs > 1 and args.parts == 1:
        found = together(args)
    else:
        found = []
        for row in rows(chosen(args), args):
            found.append(row)
            if args.parts > 1:
                print(json.dumps(dataclasses.asdict(row)), flush=True)
            if not args.json:
                print(line(row), flush=True, file=sys.stderr if args.parts > 1 else sys.stdout)
    skipped = [entry.name for entry in entries(tuple(FOLDERS)) if not fits(entry, args.device)]
    print(json.dumps(summary(found, skipped)), flush=True)
    return int(not found or not all(row.ok for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
