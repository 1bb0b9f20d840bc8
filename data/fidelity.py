"""How near a workload is to the profile that it was sampled from: what scaling changed on purpose is left out, under the same maps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tideforge.data.length_map import LengthMap
from tideforge.data.profile_records import Cells, bin_edges
from tideforge.data.workload import RequestShape

Shares = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """Kolmogorov-Smirnov distances, 0 to 1, of a part to its profile, both scaled.

    `prompt`, `output`: of first turns' lengths. `joint`: the largest distance of their two-dimensional distribution functions
    P(prompt <= x, output <= y). `gap_cv`: standard deviation / mean of the gaps between arrivals, in the part; nan below 3 arrivals.
    """

    prompt: float
    output: float
    joint: float
    gap_cv: float


def fidelity(cells: Cells, prompts: LengthMap, outputs: LengthMap, part: Sequence[RequestShape]) -> Fidelity:
    """Of the part's shapes to the joint histogram `cells`; lengths inside a bin are taken as uniform in their logarithm."""
    requests = np.array([number for *_, number in cells], dtype=np.float64) / sum(number for *_, number in cells)
    x = below([prompt for prompt, *_ in cells], prompts)
    y = below([output for _, output, _ in cells], outputs)
    have_x = at_most([shape.prompt_tokens for shape in part], prompts)
    have_y = at_most([shape.output_tokens for shape in part], outputs)
    joint = np.abs((x * requests[:, None]).T @ y - have_x.T @ have_y / len(part))
    return Fidelity(
        prompt=float(joint[:, -1].max()), output=float(joint[-1].max()), joint=float(joint.max()), gap_cv=gap_cv(part)
    )


def below(bins: Sequence[int], mapping: LengthMap) -> Shares:
    """Share of each bin that is mapped to at most each scaled length, [bins, lengths]; the last column is 1."""
    edges = np.log([bin_edges(index) for index in bins])
    steps = np.log(mapping.steps() or [1.0])[: mapping.high - mapping.low]
    shares = np.clip((steps - edges[:, :1]) / (edges[:, 1:] - edges[:, :1]), 0.0, 1.0)
    return np.hstack((shares, np.ones((len(bins), 1))))


def at_most(lengths: Sequence[int], mapping: LengthMap) -> Shares:
    """1 where a scaled length is at most the column's, [requests, lengths]."""
    return (np.array(lengths)[:, None] <= np.arange(mapping.low, mapping.high + 1)).astype(np.float64)


def gap_cv(part: Sequence[RequestShape]) -> float:
    gaps = np.diff([shape.arrival_s for shape in part])
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else math.nan
