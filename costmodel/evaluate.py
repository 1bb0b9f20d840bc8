"""Scores the ranking against measured groups: `python -m tideforge.costmodel.evaluate FILE`. The last line is JSON.

FILE is a CSV of rows in groups (iso_group) of the same model, system, engine, GPUs and users: one row a layout, with its
measured out_tok_s_per_gpu_derived. Near: the pick is within 5 % of the best. Pairs: those more than 5 % apart, put in
the right order. Ties in the prediction are averaged.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tideforge.costmodel import hardware, shapes
from tideforge.costmodel.coefficients import TIE, Coefficients
from tideforge.costmodel.folds import FOLDS, FOLDS_HELP
from tideforge.costmodel.layouts import Layout
from tideforge.costmodel.memory import Limits, Precision
from tideforge.costmodel.passes import Setting
from tideforge.costmodel.predict import Traffic, predict
from tideforge.errors import UserError

COLUMNS = (
    "model_path",
    "system",
    "backend",
    "precision",
    "isl",
    "osl",
    "total_conc",
    "replicas",
    "tp",
    "dp",
    "ep",
    "iso_group",
)
MEASURED = "out_tok_s_per_gpu_derived"
FIGURES = ("near", "top1", "mean_loss", "pairs", "p90_loss")


@dataclasses.dataclass(frozen=True)
class Point:
    """One layout of a group: measured and predicted output tokens/s per GPU."""

    group: str
    layout: Layout
    moe: bool
    measured: float
    predicted: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the file. `family`: model, system and engine."""

    group: str
    layout: Layout
    shape: shapes.ModelShape
    machine: hardware.Hardware
    precision: Precision
    traffic: Traffic
    limits: Limits
    measured: float  # output tokens/s per GPU
    model: str
    system: str
    engine: str

    @property
    def family(self) -> str:
        return f"{self.model} {self.system} {self.engine}"

    @property
    def moe(self) -> bool:
        return self.shape.experts is not None

    def setting(self, co: Coefficients) -> Setting:
        return Setting(self.layout, self.shape, self.machine, self.precision, co)

    def point(self, predicted: float) -> Point:
        return Point(self.group, self.layout, self.moe, self.measured, predicted)


@dataclasses.dataclass(frozen=True)
class Score:
    groups: int
    near: float
    top1: float
    mean_loss: float
    pairs: float
    p90_loss: float = 0.0
    n_pairs: int = 0


def read_rows(path: Path) -> list[Row]:
    """Raises UserError naming the file, and the line where one is at fault."""
    try:
        with path.open(newline="") as stream:
            lines = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(str(path), f"cannot be read ({error})", "give a CSV of measured layouts") from None
    missing = [name for name in (*COLUMNS, MEASURED) if not lines or name not in lines[0]]
    if missing:
        raise UserError(str(path), f"lacks rows or the columns {', '.join(missing)}", "give a CSV of measured layouts")
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=2)]


def _row(line: dict[str, str], where: str) -> Row:
    shape = shapes.get(line["model_path"])
    try:
        layout = Layout(tp=int(line["tp"]), ep=int(line["ep"]), dp=int(line["dp"]), replicas=int(line["replicas"]))
        traffic = Traffic(float(line["isl"]), float(line["osl"]), float(line["total_conc"]))
        measured = float(line[MEASURED])
        if not 0 < measured < math.inf:
            raise ValueError(f"{MEASURED} is {measured:g}")
    except (TypeError, ValueError) as error:
        raise UserError(where, f"is no measured layout ({error})", "mend or drop the line") from None
    return Row(
        line["iso_group"], layout, shape, hardware.get(line["system"]), _precision(line["precision"], shape), traffic,
        Limits(), measured, line["model_path"], line["system"], line["backend"],
    )  # fmt: skip


def _precision(text: str, shape: shapes.ModelShape) -> Precision:
    """The file's word for the weights. Of the KV cache it says nothing: quantised checkpoints are taken to be served with an
    fp8 one."""
    if text not in ("fp8", "fp4"):
        return Precision.of(shape)
    return Precision(shape.common_precision if shape.precision == "fp4" else text, text, "fp8")


def points(rows: Sequence[Row], co: Coefficients) -> list[Point]:
    return [row.point(predict(row.setting(co), row.traffic, row.limits).output_tokens_per_s_per_gpu) for row in rows]


def score(points: Sequence[Point]) -> Score:
    """Over groups with at least two layouts; a layout may stand there several times, as repeats."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        groups[point.group].append(point)
    near, top1, right, pairs = 0.0, 0.0, 0.0, 0
    losses: list[float] = []
    several = [group for group in groups.values() if len({point.layout for point in group}) > 1]
    for group in several:
        best = max(point.measured for point in group)
        first = max(point.predicted for point in group)
        picks = [point for point in group if point.predicted == first]
        near += sum(pick.measured >= (1 - TIE) * best for pick in picks) / len(picks)
        top1 += sum(pick.measured == best for pick in picks) / len(picks)
        losses.append(sum(1 - pick.measured / best for pick in picks) / len(picks))
        for a, b in itertools.combinations(group, 2):
            if min(a.measured, b.measured) < (1 - TIE) * max(a.measured, b.measured):
                pairs += 1
                order = (a.predicted - b.predicted) * (a.measured - b.measured)
                right += 0.5 if order == 0 else float(order > 0)
    n, losses = max(len(several), 1), sorted(losses) or [0.0]
    p90 = losses[math.ceil(0.9 * len(losses)) - 1]
    return Score(len(several), near / n, top1 / n, sum(losses) / n, right / max(pairs, 1), p90, pairs)


RULES: dict[str, Callable[[Row], float]] = {
    "always the largest engine": lambda row: row.layout.gpus_per_server,
    "always the smallest engine": lambda row: -row.layout.gpus_per_server,
}
NOISE, DRAWS = (0.03, 0.05), 40  # relative standard deviations of a measurement, and how often they are drawn


def oracle(rows: Sequence[Row], noise: float, seed: int = 0) -> Score:
    """Mean score of who knows the true tokens/s, of measurements with that noise: the ceiling of any predictor."""
    draw = random.Random(seed)
    found = []
    for _ in range(DRAWS):
        again = [dataclasses.replace(row, measured=row.measured * math.exp(draw.gauss(0, noise))) for row in rows]
        found.append(score([other.point(row.measured) for row, other in zip(rows, again, strict=True)]))
    means: dict[str, Any] = {name: statistics.fmean(getattr(one, name) for one in found) for name in FIGURES}
    return Score(found[0].groups, **means)


def interval(rows: Sequence[Row], predicted: Sequence[float], name: str, seed: int = 0) -> tuple[float, float]:
    """95 % of a figure when the families are drawn again, with replacement."""
    by: dict[str, list[Point]] = defaultdict(list)
    for row, value in zip(rows, predicted, strict=True):
        by[row.family].append(row.point(value))
    draw, found = random.Random(seed), []
    scores = [score(family) for family in by.values()]
    for _ in range(1000):
        chosen = [draw.choice(scores) for _ in scores]
        weights = [one.n_pairs if name == "pairs" else one.groups for one in chosen]
        if sum(weights):
            found.append(sum(getattr(one, name) * w for one, w in zip(chosen, weights, strict=True)) / sum(weights))
    found.sort()
    return (found[len(found) // 40], found[-len(found) // 40 - 1]) if found else (0.0, 0.0)


def parts(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Places of the rows of each part that is shown."""
    choice: dict[str, set[bool]] = defaultdict(set)
    for row in rows:
        choice[row.group].add(row.layout.ep > 1)
    found = {
        "all": list(range(len(rows))),
        "dense": [at for at, row in enumerate(rows) if not row.moe],
        "mixture of experts": [at for at, row in enumerate(rows) if row.moe],
        "with and without EP": [at for at, row in enumerate(rows) if len(choice[row.group]) > 1],
    }
    for family in sorted({row.family for row in rows}):
        found[f"  {family}"] = [at for at, row in enumerate(rows) if row.family == family]
    return found


def show(name: str, s: Score) -> None:
    figures = (
        f"near {s.near:6.1%}  top-1 {s.top1:6.1%}  loss {s.mean_loss:5.1%} (P90 {s.p90_loss:.1%})  pairs {s.pairs:6.1%}"
    )
    print(f"{name:52} {s.groups:5} groups  {figures}")


def show_all(rows: Sequence[Row], predicted: Sequence[float]) -> None:
    made = [row.point(value) for row, value in zip(rows, predicted, strict=True)]
    for name, places in parts(rows).items():
        show(name, score([made[at] for at in places]))
    for name, rule in RULES.items():
        show(name, score([row.point(float(rule(row))) for row in rows]))
    for noise in NOISE:
        show(f"an oracle, measurements with {noise:.0%} of noise", oracle(rows, noise))
    for name in FIGURES[:4]:
        low, high = interval(rows, predicted, name)
        print(f"{name}: {low:.1%} to {high:.1%} (95 %, families drawn again)")
    errors = sorted(abs(p.predicted / p.measured - 1) for p in made)
    print(f"tokens/s: half of the predictions are within {errors[len(errors) // 2]:.0%} of the measurement")


def run(path: Path, folds: str | None, as_json: bool) -> None:
    """Prints tables and, as last line, the score of all as JSON. Raises UserError."""
    rows = read_rows(path)
    if folds:
        from tideforge.costmodel.fit import Measured

        predicted = [float(value) for value in Measured(rows, Coefficients()).folded(folds)]
    else:
        predicted = [point.predicted for point in points(rows, Coefficients())]
    if not as_json:
        show_all(rows, predicted)
    found = score([row.point(value) for row, value in zip(rows, predicted, strict=True)])
    print(json.dumps({"folds": folds, **dataclasses.asdict(found)}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tideforge.costmodel.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV of measured layouts in groups")
    parser.add_argument("--folds", choices=FOLDS, help=FOLDS_HELP)
    parser.add_argument("--json", action="store_true", help="the last line only")
    args = parser.parse_args(argv)
    try:
        run(args.file, args.folds, args.json)
    except UserError as error:
        print(f"tideforge: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
