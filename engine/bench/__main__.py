"""`python -m tideforge.engine.bench PART`: measures the engine. Tables first, one JSON object as the last line.

A part goes on where its last call ended: readings lie in `<state>/results/<part>.jsonl`. `all` measures every part, `merge`
none; both print the tables of all results found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tideforge.engine.bench import decode, experiments, harm, noise, ship, steady, swap, tiers
from tideforge.engine.bench.job import Job
from tideforge.engine.bench.report import Figure, Record, environment, table
from tideforge.engine.claim import claim
from tideforge.engine.keepers import end_keeper
from tideforge.errors import PREFIX, TideforgeError, UserError

STOPPED = 130  # as a shell has it for Ctrl-C


class OneLine(argparse.ArgumentParser):
    """Says what is wrong without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PREFIX}{' '.join(message.split())}; see --help\n")


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
        with opened(args.state, args.part) as state:
            sys.exit(run(args, state))
    except UserError as error:
        print(f"{PREFIX}{error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{PREFIX}stopped", file=sys.stderr)
        sys.exit(STOPPED)


def run(args: argparse.Namespace, state: Path) -> int:
    """1 if a part failed, 130 if Ctrl-C ended one; what it had measured by then is shown like the rest."""
    if args.device == "cuda" and args.part != "merge" and detected() != "cuda":
        raise UserError(
            "--device", "is cuda, and torch sees no GPU here", "run it where there is one, or with --device cpu"
        )
    names = list(PARTS) if args.part == "all" else [] if args.part == "merge" else [args.part]
    problems: list[str] = []
    stopped = False
    for name in names:
        try:
            if problem := measured(args, state, name):
                problems.append(f"{name}: {problem}")
        except KeyboardInterrupt:
            problems.append(f"{name}: stopped; the same call goes on where it was")
            stopped = True
            break
    shown = {name: Record(state / "results", name) for name in (PARTS if args.part in ("all", "merge") else names)}
    parts = {name: record for name, record in shown.items() if record.lines}
    figures = {name: judged(record, PARTS[name].figures(record)) for name, record in parts.items()}
    for name, found in figures.items():
        print(table(name, found), end="\n\n")
    for problem in problems:
        print(f"{PREFIX}{problem}", file=sys.stderr)
    print(json.dumps(merged(parts, figures)), flush=True)
    return STOPPED if stopped else 1 if problems else 0


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
    parser = OneLine(prog="python -m tideforge.engine.bench", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all", "merge"], help="what to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is a GPU")
    parser.add_argument("--gpu", type=int, default=0, help="which GPU, as nvidia-smi counts")
    parser.add_argument("--state", type=Path, help="folder for models, services and results; a temporary one if absent")
    parser.add_argument("--trials", type=int, help="how many trials a part makes in all, over however many calls")
    parser.add_argument("--seconds", type=float, default=420.0, help="for each part, in this call")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="a Python that has vLLM 0.26.0, to set beside")
    parser.add_argument("--commit", default="", help="what is measured, where there is no checkout to ask")
    args = parser.parse_args()
    if (args.trials is not None and args.trials < 1) or not 0 < args.seconds < math.inf or args.gpu < 0:
        parser.error("--trials is at least 1, --seconds is above 0 and finite, --gpu is not negative")
    if args.vllm is not None and not os.access(args.vllm, os.X_OK):
        parser.error(f"--vllm: {args.vllm} is no program; give the python of an environment that has vLLM")
    if args.part == "merge" and (args.state is None or not (args.state / "results").is_dir()):
        parser.error(
            f"--state: {args.state or 'none is given, and it'} has no folder results; give one that a part has measured in"
        )
    return args


@contextlib.contextmanager
def opened(state: Path | None, part: str) -> Iterator[Path]:
    """The state folder, where no other call measures meanwhile. What keepers a killed one has left there are ended."""
    if state is not None:
        if part != "merge":
            taken(state)
        yield state.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tideforge-bench-") as folder:
        yield Path(folder).resolve()


def taken(state: Path) -> None:
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{state} cannot be made ({error.strerror})"
        raise UserError("--state", problem, "name a folder, or none") from None
    claim(state / "bench.lock", state, "another call of the benchmark", "wait for its end, or give another --state")
    for sock in state.resolve().glob("*/keeper.sock"):
        end_keeper(sock.parent)


def detected() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
