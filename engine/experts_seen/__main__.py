"""`python -m tideforge.engine.experts_seen [--model FOLDER] [--held-out-of FILE ...] [--time] [--json]`

How many experts random tokens activate against real ones, at 1 to 64 tokens a decode step, and how far a trial on random tokens would
be misled by that. A minute and a half on one core for the model in data/models/small-moe; the same seeds give the same counts.

Kinds of tokens, each behind a context of its own kind: `corpus`, the sample text that prompts are drawn from; `sources`, this engine's
Python; the held-out ends of texts that the model was trained on, where they are given (data/training_text.md); `mixed`, each sequence from
one of these; `shuffled`, the corpus's tokens without their order; `random`, any ids; `known`, any ids that the corpus has; `activations`,
Gaussian noise as each layer's input; `said`, what the model goes on with, greedily, behind the corpus and behind random ids.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tideforge.engine.evaluate import environment
from tideforge.engine.experts_seen import report, timed
from tideforge.engine.experts_seen.cost import Model
from tideforge.engine.experts_seen.drawn import CORPUS, ROOT, texts_of
from tideforge.engine.experts_seen.seen import Plan, measure
from tideforge.engine.train_moe import commit
from tideforge.errors import UserError

SMALL = ROOT / "data" / "models" / "small-moe"


def run(args: argparse.Namespace, plan: Plan) -> None:
    torch.set_num_threads(1)  # sums in one order on any machine
    begin = time.perf_counter()
    texts = texts_of(args.model, args.held_out_of)
    seen = measure(args.model, texts, plan, lambda line: print(line, file=sys.stderr))
    prices = report.misled(seen, Model.of_folder(args.model, args.hardware), Model.large(args.hardware))
    times = timed.measure(args.model, texts, plan) if args.time else {}
    sizes = {name: len(ids) for name, ids in texts.items()}
    print(f"{args.model}: {plan.seeds} seeds; tokens of texts: {', '.join(f'{n} {size}' for n, size in sizes.items())}")
    print("\n".join(report.text(seen, prices, times)))
    if args.json:
        about = {
            "command": "python -m tideforge.engine.experts_seen", "model": args.model.name, "hardware": args.hardware,
            "plan": dataclasses.asdict(plan), "texts": sizes, "ids_in_corpus": len(set(texts[CORPUS])),
            "commit": commit(), "time": time.strftime("%Y-%m-%d", time.gmtime()),
            "took_s": round(time.perf_counter() - begin, 1), "environment": environment(),
        }  # fmt: skip
        print(json.dumps(report.rounded({**about, **report.to_dict(seen, prices, times)})))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="how many experts random tokens activate against real ones")
    parser.add_argument(
        "--model", type=Path, default=SMALL, help="a folder with a mixture of experts and its tokenizer"
    )
    parser.add_argument("--held-out-of", type=Path, nargs="+", default=[], help="texts that the model was trained on")
    parser.add_argument("--seeds", type=int, default=Plan.seeds)
    parser.add_argument("--no-said", action="store_true", help="leave the model's own answers out: half of the time")
    parser.add_argument(
        "--time", action="store_true", help="also time the mixtures on this CPU, A B B A: half a minute more"
    )
    parser.add_argument("--hardware", default="h200-sxm", help="of data/hardware.json, for predicted steps")
    parser.add_argument("--json", action="store_true", help="end with all figures as one JSON object on one line")
    return parser.parse_args(argv)


def main() -> None:
    args = parse(sys.argv[1:])
    try:
        run(args, Plan(args.seeds, said=not args.no_said))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
