"""The smallest fault that each gate catches, measured.

`python -m tideforge.tasks.verify.sensitivity [--model NAME|FOLDER ...] [--dtype D ...] [--draws N] [--out FILE] [--json]`
`python -m tideforge.tasks.verify.sensitivity --show docs/records/sensitivity.json` prints a record's tables.

For each fault (faults.py) and gate the sizes, from the largest to the smallest, are searched by halving for the smallest one
that the gate catches in every draw of texts. All gates see the same worker. A gate that does not catch the largest is blind to
the fault: "-". The raw forward must pass every gate in as many draws; what a gate says that it is blind to on this model, or cannot
be asked, is kept. Gates that need more than a probe (own.py) are not measured. Last line: JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import DOUBLES
from tideforge.engine.evaluate import environment
from tideforge.engine.forward import Forward
from tideforge.engine.gates import GATES, asked
from tideforge.engine.gates.caught import Caught, Unverifiable
from tideforge.engine.gates.probe import POISON, Probe
from tideforge.engine.gates.thresholds import TRAINED, text_of
from tideforge.engine.lab import Lab, end_keeper
from tideforge.engine.model_config import model_for
from tideforge.engine.reference import Reference
from tideforge.errors import CandidateError
from tideforge.tasks.verify.faults import FAULTS, Fault

BLOCKS, LIMITS = 64, Limits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)
SMALL = ("llama", "moe", "small-moe")
OK = ""
CELL = 11


@dataclasses.dataclass
class Notes:
    """Of gates beside their evidence: what each took last, and what it said of itself, if anything."""

    seconds: dict[str, float]
    blind: dict[str, str]


class Bench:
    """One model's keeper, arena and reference, and gates run on any forward of it, until closed."""

    def __init__(self, model: Path, dtype: str, state: Path, context: int = 0) -> None:
        self.lab = Lab(Settings(state, model, dtype=dtype, num_blocks=BLOCKS, limits=LIMITS))
        self.reference = Reference.start(model)
        self.layers = range(self.lab.config.num_hidden_layers)
        text = text_of(model, self.lab.config.vocab_size)
        self.text, self.context = tuple(text[len(text) // 2 :]), context
        self.bounds = self.reference.bounds(dtype, self.text, self.layers)
        self.arena = self.lab.arena("sensitivity")

    def close(self) -> None:
        self.reference.close()
        self.lab.close()
        end_keeper(self.lab.settings.state)

    @contextlib.contextmanager
    def probe(self, forward: Forward) -> Iterator[Probe]:
        """On a fresh worker, which ends afterwards."""
        self.arena.fill(POISON)
        worker = self.lab.spawn(forward, self.arena)
        try:
            yield Probe(
                forward.id, worker, self.arena, self.reference, LIMITS, self.layers, self.bounds, self.text,
                lambda: secrets.randbits(63), context=self.context,
            )  # fmt: skip
        finally:
            self.lab.release(worker)

    def run(self, forward: Forward, gates: Sequence[str], notes: Notes | None = None) -> dict[str, str]:
        """What each gate says of the forward: its evidence, OK where it passes."""
        said, notes = {}, notes or Notes({}, {})
        with self.probe(forward) as probe:
            for name in gates:
                begin = time.perf_counter()
                said[name] = one(name, probe, notes.blind)
                notes.seconds[name] = time.perf_counter() - begin
        return said


def one(name: str, probe: Probe, blind: dict[str, str]) -> str:
    """The evidence. What the gate could not tell goes into `blind`."""
    try:
        if reason := asked(name, probe).get("blind"):
            blind[name] = f"blind to {reason}"
    except Unverifiable as reason:
        blind[name] = f"not asked: {reason}"
    except Caught as caught:
        return str(caught)
    except CandidateError as error:
        return f"{error.outcome}: {error.message}"
    return OK


class Search:
    """Which sizes of one fault each gate catches in all draws. A size is tried once, by all gates that may still ask for it."""

    def __init__(self, bench: Bench, raw: Forward, fault: Fault, draws: int) -> None:
        self.bench, self.raw, self.fault, self.draws = bench, raw, fault, draws
        self.caught: dict[int, dict[str, bool]] = {}

    def catches(self, index: int, gates: Sequence[str]) -> dict[str, bool]:
        seen = self.caught.setdefault(index, {})
        left = [gate for gate in gates if gate not in seen]
        forward = self.fault.of(self.raw, self.fault.sizes[index])
        assert forward is not None
        seen |= dict.fromkeys(left, True)
        for _ in range(self.draws):
            still = [gate for gate in left if seen[gate]]
            if still:
                seen |= {gate: bool(said) for gate, said in self.bench.run(forward, still).items()}
        return {gate: seen[gate] for gate in gates}

    def smallest(self, gates: Sequence[str]) -> dict[str, float | None]:
        """Of each gate; None where it is blind to the largest size. Halving: at each size all gates that are undecided there."""
        found: dict[str, float | None] = dict.fromkeys(gates)
        first = self.catches(0, gates)
        spans = {gate: (0, len(self.fault.sizes)) for gate in gates if first[gate]}
        while open_ := {gate: span for gate, span in spans.items() if span[1] - span[0] > 1}:
            middle = max((low + high) // 2 for low, high in open_.values())
            here = [gate for gate, (low, high) in open_.items() if (low + high) // 2 == middle]
            for gate, yes in self.catches(middle, here).items():
                spans[gate] = (middle, spans[gate][1]) if yes else (spans[gate][0], middle)
        return found | {gate: self.fault.sizes[low] for gate, (low, _) in spans.items()}


def measure(model: Path, dtype: str, draws: int, faults: Sequence[str], state: Path) -> dict[str, Any]:
    """{"faults": {fault: {gate: smallest size or None}}, "rejected": raw forwards rejected, "seconds": of a gate on the raw one,
    "blind": {gate: what it could not tell on it}}."""
    with contextlib.closing(Bench(model, dtype, state)) as bench:
        raw, notes = Forward.load(model_for(bench.lab.config.architecture)), Notes({}, {})
        said = [bench.run(raw, [*GATES], notes) for _ in range(draws)]
        rejected = [f"{gate}: {why}" for each in said for gate, why in each.items() if why]
        found = {}
        for fault in (FAULTS[name] for name in faults):
            if fault.of(raw, fault.sizes[0]) is not None:
                found[fault.name] = Search(bench, raw, fault, draws).smallest([*GATES])
                print(f"{model.name} {dtype} {fault.name}: {found[fault.name]}", file=sys.stderr, flush=True)
        return {
            "dtype": dtype, "faults": found, "rejected": rejected, "blind": notes.blind,
            "seconds": {gate: round(seconds, 2) for gate, seconds in notes.seconds.items()},
        }  # fmt: skip


def shown(fault: Fault, size: float | None) -> str:
    if size is None:
        return "-"
    return f"2^{math.log2(size):g}" if fault.unit == "1 - e" else f"{size:g}"


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for name, result in found.items():
        faults = [*result["faults"]]
        lines += [f"{name}: smallest fault caught ({', '.join(f'{f}: {FAULTS[f].unit}' for f in faults)})"]
        for place, first in enumerate(("", "gate")):
            head = "".join(f"{fault.split()[place]:>{CELL}}" for fault in faults)
            lines.append(f"{first:27}{head}{('', 'seconds')[place]:>{CELL}}".rstrip())
        for gate, seconds in result["seconds"].items():
            row = "".join(f"{shown(FAULTS[fault], result['faults'][fault][gate]):>{CELL}}" for fault in faults)
            lines.append(f"{gate:27}{row}{seconds:>{CELL}.2f}")
        lines += [f"on the raw forward {gate} is {why}" for gate, why in result["blind"].items()]
        lines.append(f"raw forward rejected: {result['rejected'] or 'never'}\n")
    return "\n".join(lines)


def commit() -> str:
    """Of the tree that this runs from, and whether files differ from it."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure the smallest fault that each gate catches")
    parser.add_argument(
        "--model", action="append", help="a small model's name (small-moe or one of doubles.py), or a folder"
    )
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--fault", action="append", choices=[*FAULTS])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the record goes, again after each model and precision")
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--show", type=Path, help="a record: its tables, and nothing is measured")
    return parser.parse_args()


def main() -> None:
    args, begin = parsed(), time.perf_counter()
    if args.show is not None:
        print(table(json.loads(args.show.read_text())["models"]))
        return
    found: dict[str, Any] = {}
    record = {
        "command": f"python -m tideforge.tasks.verify.sensitivity {shlex.join(sys.argv[1:])}", "draws": args.draws,
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "environment": environment(),
        "seconds": 0, "models": found,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in itertools.product(args.model or SMALL, args.dtype or ("float32",)):
            model = TRAINED if name == TRAINED.name else Path(name)
            if name in DOUBLES:
                model = DOUBLES[name](Path(folder) / f"{name}-{dtype}" / name)
            state = Path(folder) / f"{model.name}-{dtype}-state"
            found[f"{model.name} {dtype}"] = measure(model, dtype, args.draws, args.fault or [*FAULTS], state)
            record["seconds"] = round(time.perf_counter() - begin)
            if args.out is not None:
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    if not args.json:
        print(table(found))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
