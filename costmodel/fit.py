"""Fits the coefficients to measured layouts: `python -m tideforge.costmodel.fit FILE` writes data/coefficients.json's fitted part.

What counts is the order inside a group of layouts, so a row's error is first of its logarithm against the group's mean, and
a little of the whole; every family weighs the same; and each coefficient is drawn to what was known of it before.
Needs scipy (`pip install 'tideforge[fit]'`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tideforge.costmodel.coefficients import FITTED, Coefficients, stored
from tideforge.costmodel.evaluate import Row, read_rows, score, show
from tideforge.costmodel.passes import Exchange, Part, Work, seconds
from tideforge.costmodel.predict import passes_of
from tideforge.data.files import sha256_file, whole
from tideforge.errors import UserError

Vector = NDArray[np.float64]
# Before anything was fitted: shares as aiconfigurator's system files and data sheets of libraries have them, an empty kernel in
# a graph 1.3 us (read on an H200) times about 6 a layer, BLIS' published 4.4 us a request and step, and guesses of their size.
PRIOR = {
    "read_share": 0.8, "kv_read_share": 0.8, "expert_read_share": 0.8, "flops_share": 0.6, "expert_flops_share": 0.6,
    "link_share": 0.7, "link_latency_s": 8e-6, "link_hop_s": 2e-6, "layer_s": 8e-6, "moe_layer_s": 10e-6, "ep_layer_s": 8e-6,
    "step_s": 500e-6, "request_s": 4.4e-6, "prompt_s": 2e-3, "stream_passes": 8.0, "expert_stream_passes": 4.0,
    "expert_skew": 0.3, "expert_imbalance": 0.15,
}  # fmt: skip
WHOLE, DRAWN = 0.1, 0.5  # weight of the error of the whole, and of a factor e between a coefficient and what was known
ROUNDS = 20


def coordinates(values: dict[str, float]) -> Vector:
    """Shares as the logarithm of their odds, so that none passes 1; all else as its logarithm."""
    return np.array([np.log(v / (1 - v)) if name.endswith("share") else np.log(v) for name, v in values.items()])


def coefficients(at: Vector) -> Coefficients:
    values: dict[str, Any] = {
        name: float(1 / (1 + np.exp(-x)) if name.endswith("share") else np.exp(x))
        for name, x in zip(PRIOR, at, strict=True)
    }
    return dataclasses.replace(Coefficients(), **values)


def stacked(works: Sequence[Work]) -> Work:
    """Arrays of many passes."""

    def arrays(kind: type[Any], records: Sequence[Any]) -> Any:
        made: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            column = [getattr(record, field.name) for record in records]
            if isinstance(column[0], Part):
                made[field.name] = arrays(Part, column)
            elif isinstance(column[0], dict):
                none = Exchange(0.0, 0.0, 0.0)
                names = sorted({name for entry in column for name in entry})
                made[field.name] = {
                    name: arrays(Exchange, [entry.get(name, none) for entry in column]) for name in names
                }
            else:
                made[field.name] = np.array(column, dtype=np.float64)
        return kind(**made)

    return arrays(Work, works)  # type: ignore[no-any-return]


class Measured:
    """Rows of a file of measured layouts, ready to be priced with any coefficients."""

    def __init__(self, rows: Sequence[Row], co: Coefficients) -> None:
        """`co` decides the memory, and so how many requests are in flight; it is not what is fitted."""
        self.rows = list(rows)
        passes = [passes_of(row.setting(co), row.traffic, row.limits) for row in self.rows]
        self.decode, self.prefill = (stacked([getattr(p, name) for p in passes]) for name in ("decode", "prefill"))
        self.steps, self.prompts, self.scale = (
            np.array([getattr(p, name) for p in passes]) for name in ("decode_steps", "prompts", "tokens_a_round")
        )
        self.measured = np.log([row.measured for row in self.rows])
        self.groups = np.unique([row.group for row in self.rows], return_inverse=True)[1]
        self.families = np.unique([row.family for row in self.rows], return_inverse=True)[1]

    def predicted(self, co: Coefficients) -> Vector:
        """Output tokens/s per GPU, [rows]."""
        step_s, prompt_s = (sum(seconds(work, co).values()) for work in (self.decode, self.prefill))
        return np.asarray(self.scale / (self.prompts * prompt_s + self.steps * step_s))

    def errors(self, chosen: NDArray[np.intp]) -> Callable[[Vector], Vector]:
        """Of coordinates: what is made small, for the chosen rows."""
        group = np.unique(self.groups[chosen], return_inverse=True)[1]
        family = np.unique(self.families[chosen], return_inverse=True)[1]
        weight = np.bincount(family)[family] ** -0.5
        weight, start = weight / weight.mean(), coordinates(PRIOR)

        def of(at: Vector) -> Vector:
            off = (np.log(self.predicted(coefficients(at))) - self.measured)[chosen]
            inside = off - (np.bincount(group, off) / np.bincount(group))[group]
            return np.concatenate([weight * inside, WHOLE * weight * off, DRAWN * (at - start)])

        return of

    def fitted(self, chosen: NDArray[np.intp] | None = None) -> Coefficients:
        """To the rows of these places, or all."""
        try:
            from scipy.optimize import least_squares
        except ImportError:
            raise UserError("scipy", "is not installed, and fitting needs it", "pip install 'tideforge[fit]'") from None
        errors = self.errors(np.arange(len(self.rows)) if chosen is None else chosen)
        found = least_squares(errors, coordinates(PRIOR), loss="soft_l1", f_scale=0.1, max_nfev=ROUNDS)
        return coefficients(found.x)

    def folded(self, by: str) -> Vector:
        """Predictions of every row by a fit that saw no row of the same family, model or system."""
        keys = np.array([getattr(row, by) for row in self.rows])
        if len(set(keys)) < 2:
            raise UserError(f"--folds {by}", f"all rows are of one {by}", "give a file with several, or fold otherwise")
        predicted = np.zeros(len(self.rows))
        for number, key in enumerate(found := np.unique(keys), start=1):
            if sys.stderr.isatty():
                print(f"\rfit {number} of {len(found)}, without {key}\033[K", end="", file=sys.stderr, flush=True)
            out = keys == key
            predicted[out] = self.predicted(self.fitted(np.flatnonzero(~out)))[out]
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        return predicted


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tideforge.costmodel.fit", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV of measured layouts in groups")
    parser.add_argument("--out", type=Path, help="JSON to write; data/coefficients.json of the package if absent")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.file)
        data = Measured(rows, Coefficients())
        found = data.fitted()
    except UserError as error:
        print(f"tideforge: {error}", file=sys.stderr)
        return 2
    file, source = stored(), f"fitted to {args.file.name} (sha256 {sha256_file(args.file)[:12]}) by costmodel/fit.py"
    for name in PRIOR:
        value = float(f"{getattr(found, name):.4g}")
        file["coefficients"][name] = {"value": value, "tag": FITTED, "source": source}
        print(f"{name:22} {value:g} (before: {PRIOR[name]:g})")
    file["fitted_on"] = sorted({row.machine.name for row in rows})
    out = args.out or Path(__file__).resolve().parents[1] / "data" / "coefficients.json"
    with whole(out) as temporary:
        temporary.write_text(json.dumps(file, indent=1, sort_keys=True) + "\n")
    for label, co in (("as known before", coefficients(coordinates(PRIOR))), ("fitted, nothing left out", found)):
        show(label, score([row.point(float(value)) for row, value in zip(rows, data.predicted(co), strict=True)]))
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
