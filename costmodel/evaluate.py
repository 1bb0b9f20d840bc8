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
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tideforge.costmodel import hardware, shapes
from tideforge.costmodel.coefficients import TIE, Coefficients
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


@dataclasses.dataclass(frozen=True)
class Point:
    """One layout of a group: measured and predicted output tokens/s per GPU."""

    group: str
    layout: Layout
    moe: bool
    measured: float
    predicted: float


@dataclasses.dataclass(frozen=True)
class Score:
    groups: int
    near: float
    top1: float
    mean_loss: float
    pairs: float


def read_points(path: Path, co: Coefficients) -> list[Point]:
    """Raises UserError naming the file, and the line where one is at fault."""
    try:
        with path.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(str(path), f"cannot be read ({error})", "give a CSV of measured layouts") from None
    missing = [name for name in (*COLUMNS, MEASURED) if not rows or name not in rows[0]]
    if missing:
        raise UserError(str(path), f"lacks rows or the columns {', '.join(missing)}", "give a CSV of measured layouts")
    return [_point(row, f"{path}:{line}", co) for line, row in enumerate(rows, start=2)]


def _point(row: dict[str, str], where: str, co: Coefficients) -> Point:
    shape = shapes.get(row["model_path"])
    try:
        layout = Layout(tp=int(row["tp"]), ep=int(row["ep"]), dp=int(row["dp"]), replicas=int(row["replicas"]))
        traffic = Traffic(float(row["isl"]), float(row["osl"]), float(row["total_conc"]))
        measured = float(row[MEASURED])
    except (TypeError, ValueError) as error:
        raise UserError(where, f"is no measured layout ({error})", "mend or drop the line") from None
    setting = Setting(
        layout, shape, hardware.get(row["system"]), _precision(row["precision"], row["backend"], shape), co
    )
    predicted = predict(setting, traffic, Limits()).output_tokens_per_s_per_gpu
    return Point(row["iso_group"], layout, shape.experts is not None, measured, predicted)


def _precision(text: str, backend: str, shape: shapes.ModelShape) -> Precision:
    """The file's word for the weights; TensorRT-LLM's quantised checkpoints keep an fp8 KV cache."""
    if text not in ("fp8", "fp4"):
        return Precision.of(shape)
    kv = "fp8" if backend == "trtllm" else "bf16"
    common = shape.common_precision if shape.precision == "fp4" else text
    return Precision(common, text, kv)


def score(points: Sequence[Point]) -> Score:
    """Over groups with at least two layouts; a layout may stand there several times, as repeats."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        groups[point.group].append(point)
    near, top1, loss, right, pairs = 0.0, 0.0, 0.0, 0.0, 0
    several = [group for group in groups.values() if len({point.layout for point in group}) > 1]
    for group in several:
        best = max(point.measured for point in group)
        first = max(point.predicted for point in group)
        picks = [point for point in group if point.predicted == first]
        near += sum(pick.measured >= (1 - TIE) * best for pick in picks) / len(picks)
        top1 += sum(pick.measured == best for pick in picks) / len(picks)
        loss += sum(1 - pick.measured / best for pick in picks) / len(picks)
        for a, b in itertools.combinations(group, 2):
            if min(a.measured, b.measured) < (1 - TIE) * max(a.measured, b.measured):
                pairs += 1
                order = (a.predicted - b.predicted) * (a.measured - b.measured)
                right += 0.5 if order == 0 else float(order > 0)
    n = max(len(several), 1)
    return Score(len(several), near / n, top1 / n, loss / n, right / max(pairs, 1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tideforge.costmodel.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV of measured layouts in groups")
    try:
        points = read_points(parser.parse_args(argv).file, Coefficients())
    except UserError as error:
        print(f"tideforge: {error}", file=sys.stderr)
        return 2
    parts = {
        "all": points,
        "dense": [p for p in points if not p.moe],
        "mixture of experts": [p for p in points if p.moe],
    }
    for name, part in parts.items():
        s = score(part)
        figures = f"near {s.near:.1%}  top-1 {s.top1:.1%}  loss {s.mean_loss:.1%}  pairs {s.pairs:.1%}"
        print(f"{name:20} {s.groups:5} groups  {figures}")
    errors = sorted(abs(p.predicted / p.measured - 1) for p in points if p.measured > 0)
    print(f"tokens/s: half of the predictions are within {errors[len(errors) // 2]:.0%} of the measurement")
    print(json.dumps(dataclasses.asdict(score(points))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
