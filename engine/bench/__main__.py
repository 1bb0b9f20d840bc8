"""`python -m tideforge.engine.bench PART`: measures the engine. Tables first, one JSON object as the last line.

A part goes on where its last call ended: readings lie in `<state>/results/<part>.jsonl`. `all` measures every part, `merge`
none; both print the tables of all results found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tideforge.engine.bench import decode, experiments, harm, noise, ship, steady, swap, tiers
from tideforge.engine.bench.job import Job
from tideforge.engine.bench.report import Figure, Record, environment, table
from tideforge.errors import TideforgeError, UserError


class Part(Protocol):
    """A module that appends to a record until it is complete or the job's time is over, and computes figures from it."""

    def measure(self, job: Job, record: Record) -> None: ...
    def figures(self, record: Record) -> list[Figure]: ...


PARTS: dict[str, Part] = {
    "decode": decode, "swap": swap, "experiments": experiments, "tiers": tiers, "harm": harm, "steady": steady,
    "noise": noise, "ship": ship,
}  # fmt: skip


def main() -> None:
    args = arguments()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(args.gpu))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a part has started ends with it
    try:
        with opened(args.state) as state:
            sys.exit(run(args, state))
    except UserError as error:
        print(f"tideforge: {error}", file=sys.stderr)
        sys.exit(2)


def run(args: argparse.Namespace, state: Path) -> int:
    """1 if a part failed; what it had measured by then is shown like the rest."""
    if args.device == "cuda" and args.part != "merge" and detected() != "cuda":
        raise UserError(
            "--device", "is cuda, and torch sees no GPU here", "run it where there is one, or with --device cpu"
        )
    names = list(PARTS) if args.part == "all" else [] if args.part == "merge" else [args.part]
    problems = [f"{name}: {problem}" for name in names if (problem := measured(args, state, name))]
    shown = {name: Record(state / "results", name) for name in (PARTS if args.part in ("all", "merge") else names)}
    parts = {name: record for name, record in shown.items() if record.lines}
    figures = {name: judged(record, PARTS[name].figures(record)) for name, record in parts.items()}
    for name, found in figures.items():
        print(table(name, found), end="\n\n")
    for problem in problems:
        print(f"tideforge: {problem}", file=sys.stderr)
    print(json.dumps(merged(parts, figures)), flush=True)
    return 1 if problems else 0


def measured(args: argparse.Namespace, state: Path, name: str) -> str:
    """Runs one part; "", or why it ended early."""
    device = args.device or detected()
    job = Job(device, state, args.trials, args.seconds, args.vllm)
    record, begin = Record(job.results, name), time.perf_counter()
    if record.lines:
        print(
            f"{name}: goes on after {len(record.lines)} lines of {record.path}; remove it to measure anew", flush=True
        )
    record.add("run", **environment(device, args.gpu, args.commit))
    try:
        PARTS[name].measure(job, record)
    except TideforgeError as error:
        if isinstance(error, UserError) and args.part != "all":
            raise
        return str(error)
    finally:
        record.add("end", seconds=round(time.perf_counter() - begin, 1))
    return ""


def judged(record: Record, figures: Sequence[Figure]) -> list[Figure]:
    """Goals are an H200's: elsewhere only what must be none is judged."""
    if all(line["device"] == "cuda" for line in record.of("run")):
        return list(figures)
    return [figure if figure.goal == "<= 0" else dataclasses.replace(figure, met=None) for figure in figures]


def merged(records: Mapping[str, Record], figures: Mapping[str, Sequence[Figure]]) -> dict[str, Any]:
    """For machines: of each part the environment of every call and the figures under their names."""
    return {
        name: {
            "environment": record.of("run"),
            "seconds": [line["seconds"] for line in record.of("end")],
            "figures": [dataclasses.asdict(figure) for figure in figures[name]],
        }
        for name, record in records.items()
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tideforge.engine.bench", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all", "merge"], help="what to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is a GPU")
    parser.add_argument("--gpu", type=int, default=0, help="which GPU, as nvidia-smi counts")
    parser.add_argument("--state", type=Path, help="folder for models, services and results; a temporary one if absent")
    parser.add_argument("--trials", type=int, help="how many trials a part makes in all, over however many calls")
    parser.add_argument("--seconds", type=float, default=420.0, help="for each part, in this call")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="a Python that has vLLM 0.26.0, to set beside")
    parser.add_argument("--commit", default="", help="what is measured, where there is no checkout to ask")
    args = parser.parse_args()
    if (args.trials is not None and args.trials < 1) or args.seconds <= 0 or args.gpu < 0:
        parser.error("--trials is at least 1, --seconds is above 0, --gpu is not negative")
    if args.vllm is not None and not os.access(args.vllm, os.X_OK):
        parser.error(f"--vllm: {args.vllm} is no program; give the python of an environment that has vLLM")
    return args


@contextlib.contextmanager
def opened(state: Path | None) -> Iterator[Path]:
    if state is not None:
        if state.exists() and not state.is_dir():
            raise UserError("--state", f"{state} is not a folder", "name a folder, or none")
        state.mkdir(parents=True, exist_ok=True)
        yield state.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tideforge-bench-") as folder:
        yield Path(folder).resolve()


def detected() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
