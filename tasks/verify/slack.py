"""By how much workers of forwards that keep nothing undeclared differ in what they hold: the slack of the gate `packing`.

`python -m tideforge.tasks.verify.slack [--model NAME|FOLDER ...] [--dtype D ...] [--draws N] [--gates NAME ...] [--write]`

Of each model the raw forward and what the offline agent makes of it by all its rewrites are compared with a raw forward's fresh worker as
the gate compares them, less what they declare: a fresh worker, and at the worst of all looks one that has lived through the gates.
Each slack is SAFETY times the most that was seen, in whole MiB. `--write` puts them into data/packing.json. Last line: JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
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
from tideforge.engine.random_shapes import weights_bytes
from tideforge.engine.reference import Reference
from tideforge.tasks.search.offline.recipes import cook, fitting
from tideforge.tasks.search.offline.rules import RULES
from tideforge.tasks.verify.examine import run_gate
from tideforge.tasks.verify.packing import FILE, MIB, Slack, beyond_raw
from tideforge.tasks.verify.trialled import Trialled

SAFETY = 2.0
SMALL = (*DOUBLES, "small-moe")
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024)
BLOCKS, USERS = 512, 4
SHAPES = tuple(RequestShape(16 * (1 + index), 8) for index in range(2 * USERS))


@dataclasses.dataclass(frozen=True)
class Reading:
    """Bytes that a worker held more than a fresh one of the raw forward, and than its own forward declares."""

    model: str
    dtype: str
    forward: str
    fresh: int
    lived: int


class Place:
    """What a draw needs of one model at one precision."""

    def __init__(self, model: Path, dtype: str, device: str, folder: Path) -> None:
        self.model, config = model, ModelConfig.load(model)
        state = folder / f"{model.name}-{dtype}-state"
        state.mkdir()
        self.settings = Settings(state, model, dtype=dtype, num_blocks=BLOCKS, limits=LIMITS, device=device)
        text = tuple(text_of(model, config.vocab_size))
        self.work = Workload(USERS, SHAPES, SHAPES, text, "slack", 0)
        self.raw = Forward.load(model_for(config.architecture))
        with contextlib.closing(Reference.start(model, device=device)) as reference:
            self.bounds = reference.bounds(dtype, text[: len(text) // 2])

    @property
    def forwards(self) -> dict[str, Forward]:
        last = {rule.group or rule.name: rule.name for rule in fitting(RULES, self.raw)}
        cooked, _ = cook(RULES, self.raw, last.values(), weights_bytes(self.model, self.settings.dtype))
        return {"raw": self.raw, "offline": cooked}

    def reading(self, name: str, forward: Forward, gates: Sequence[str]) -> Reading:
        settings = self.settings
        with contextlib.closing(
            Trialled(settings, settings.state, self.raw, forward, self.work, self.bounds)
        ) as trialled:
            trialled.warm()
            for gate in gates:
                run_gate(gate, trialled.probe())
                trialled.look()
            kept = beyond_raw(trialled)
        return Reading(
            self.model.name, settings.dtype, name, kept.fresh - forward.packing, kept.lived - forward.packing
        )


def slack_of(found: Sequence[Reading]) -> Slack:
    def whole(most: int) -> int:
        return MIB * math.ceil(SAFETY * most / MIB)

    return Slack(whole(max(one.fresh for one in found)), whole(max(one.lived for one in found)))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="by how much workers of one forward differ in what they hold")
    parser.add_argument("--model", action="append", help="small-moe, one of doubles.py, or a folder")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--gates", nargs="*", default=[*GATES], help="that a worker lives through")
    parser.add_argument("--write", action="store_true", help=f"the slacks into {FILE.name}")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    found: list[Reading] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in itertools.product(args.model or SMALL, args.dtype or ("float32",)):
            model = TRAINED if name == TRAINED.name else Path(name)
            if name in DOUBLES:
                model = DOUBLES[name](Path(folder) / dtype / name)
            place = Place(model, dtype, args.device, Path(folder))
            for (what, forward), _ in itertools.product(place.forwards.items(), range(args.draws)):
                found.append(one := place.reading(what, forward, args.gates))
                sizes = f"{one.fresh / MIB:8.2f} MiB fresh {one.lived / MIB:8.2f} MiB lived"
                print(f"{one.model:24}{one.dtype:10}{one.forward:9}{sizes}", flush=True)
            end_keeper(place.settings.state)
    slack = dataclasses.asdict(slack_of(found))
    record: dict[str, Any] = {
        "command": f"python -m tideforge.tasks.verify.slack {shlex.join(sys.argv[1:])}", "environment": environment(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "safety": SAFETY,
        "readings": [dataclasses.asdict(one) for one in found],
    }  # fmt: skip
    if args.write:
        kind = "cpu" if args.device == "cpu" else "gpu"
        kept = json.loads(FILE.read_text()) if FILE.exists() else {"slack_bytes": {}, "records": {}}
        kept["slack_bytes"][kind], kept["records"][kind] = slack, record
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({**record, "slack_bytes": slack}))


if __name__ == "__main__":
    main()
