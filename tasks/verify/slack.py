"""By how much workers of one forward differ in what they hold: the slack of the gate `packing`.

`python -m tideforge.tasks.verify.slack [--model NAME|FOLDER ...] [--device D] [--draws N] [--gates NAME ...] [--write]`

Each draw is a raw forward's worker against a fresh one of the same, as the gate compares them: just after its start, and after every
gate of engine/gates. The slack is SAFETY times the most that was seen, in whole MiB. `--write` puts it into data/packing.json.
Last line: JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import DOUBLES
from tideforge.engine.evaluate import environment
from tideforge.engine.forward import Forward
from tideforge.engine.gates import GATES
from tideforge.engine.gates.thresholds import TRAINED, text_of
from tideforge.engine.lab import end_keeper
from tideforge.engine.model_config import ModelConfig, model_for
from tideforge.engine.reference import Reference
from tideforge.tasks.verify.examine import run_gate
from tideforge.tasks.verify.packing import FILE, MIB, beyond_raw
from tideforge.tasks.verify.trialled import Trialled

SAFETY = 2.0
SMALL = (*DOUBLES, "small-moe")
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024)
BLOCKS, USERS = 512, 4
SHAPES = tuple(RequestShape(16 * (1 + index), 8) for index in range(2 * USERS))


@dataclasses.dataclass(frozen=True)
class Reading:
    """Bytes that a worker held more than a fresh one of the same forward."""

    model: str
    after: str  # "start" or "gates"
    bytes: int


def read(model: Path, device: str, draws: int, gates: list[str], folder: Path) -> list[Reading]:
    settings = Settings(folder / f"{model.name}-state", model, num_blocks=BLOCKS, limits=LIMITS, device=device)
    config = ModelConfig.load(model)
    text, raw = tuple(text_of(model, config.vocab_size)), Forward.load(model_for(config.architecture))
    work, found = Workload(USERS, SHAPES, SHAPES, text, "slack", 0), []
    settings.state.mkdir()
    with contextlib.closing(Reference.start(model, device=device)) as reference:
        bounds = reference.bounds(settings.dtype, text[: len(text) // 2])
    for _ in range(draws):
        with contextlib.closing(Trialled(settings, settings.state, raw, raw, work, bounds)) as trialled:
            trialled.warm()
            found.append(Reading(model.name, "start", beyond_raw(trialled)[0]))
            for name in gates:
                run_gate(name, trialled.probe())
            found.append(Reading(model.name, "gates", beyond_raw(trialled)[0]))
        print("  ".join(f"{one.model} after {one.after}: {one.bytes / MIB:.2f} MiB" for one in found[-2:]), flush=True)
    end_keeper(settings.state)
    return found


def slack_of(found: list[Reading]) -> int:
    return MIB * math.ceil(SAFETY * max(abs(one.bytes) for one in found) / MIB)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="by how much workers of one forward differ in what they hold")
    parser.add_argument("--model", action="append", help="small-moe, one of doubles.py, or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--gates", nargs="*", default=[*GATES], help="between the two readings of a draw")
    parser.add_argument("--write", action="store_true", help=f"the slack into {FILE.name}")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    found: list[Reading] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model or SMALL:
            model = TRAINED if name == TRAINED.name else Path(name)
            if name in DOUBLES:
                model = DOUBLES[name](Path(folder) / name)
            found += read(model, args.device, args.draws, args.gates, Path(folder))
    kind = "cpu" if args.device == "cpu" else "gpu"
    record: dict[str, Any] = {
        "command": " ".join(["python -m tideforge.tasks.verify.slack", *sys.argv[1:]]), "environment": environment(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "safety": SAFETY,
        "readings": [dataclasses.asdict(one) for one in found],
    }  # fmt: skip
    if args.write:
        kept = json.loads(FILE.read_text()) if FILE.exists() else {"slack_bytes": {}, "records": {}}
        kept["slack_bytes"][kind], kept["records"][kind] = slack_of(found), record
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({**record, "slack_bytes": slack_of(found)}))


if __name__ == "__main__":
    main()
