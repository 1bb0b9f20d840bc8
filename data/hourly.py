"""Traffic as hourly histograms: what the watches of drift see, and all that they see.

One DuckDB pass makes them from the table `requests`; a generator that makes such histograms stands in for a log.
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from tideforge.errors import UserError

PROMPT_LOW, PROMPT_BINS = 4, 16  # octaves: 16 tokens and less to 2^19 and more
OUTPUT_LOW, OUTPUT_BINS = 2, 11  # 4 tokens and less to 2^12 and more
CACHED_BINS = 5  # fifths of the prompt that the prefix cache gave
ALL = "all"
HOUR_US = 3_600_000_000
Counts = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Named:
    """Requests an hour of each name of one kind: counts [hours, names]."""

    kind: str  # region | tenant | model
    names: tuple[str, ...]
    counts: Counts


@dataclasses.dataclass(frozen=True)
class Hourly:
    """Histograms of whole hours that follow each other; an hour without requests is a row of zeros.

    scopes: `all` first, then `region NAME`. joint [hours, scopes, PROMPT_BINS, OUTPUT_BINS], cached [hours, scopes,
    CACHED_BINS] (only requests whose log tells), named: one entry a kind, in the order of its names.
    """

    first_hour: int  # since the epoch, UTC
    scopes: tuple[str, ...]
    joint: Counts
    cached: Counts
    named: tuple[Named, ...]

    def __post_init__(self) -> None:
        if self.joint.shape[:2] != self.cached.shape[:2] or self.joint.shape[1] != len(self.scopes):
            raise ValueError("joint, cached and scopes disagree")

    @property
    def hours(self) -> int:
        return int(self.joint.shape[0])

    @property
    def requests(self) -> Counts:
        """[hours, scopes]"""
        return np.asarray(self.joint.reshape(*self.joint.shape[:2], -1).sum(axis=2))

    def part(self, begin: int, end: int) -> Hourly:
        """Hours `begin` to `end` - 1, counted from the first."""
        named = tuple(Named(each.kind, each.names, each.counts[begin:end]) for each in self.named)
        return Hourly(self.first_hour + begin, self.scopes, self.joint[begin:end], self.cached[begin:end], named)


def hourly_of(db: duckdb.DuckDBPyConnection, begin: int = 0, end: int = 2**30) -> Hourly:
    """Of the table `requests`, from the hour of its first arrival to that of its last, of the hours `begin` to `end` - 1
    since the epoch. UserError when there are no rows in them."""
    times = {"begin_us": begin * HOUR_US, "end_us": end * HOUR_US}
    edges = {
        "prompt_low": PROMPT_LOW, "prompt_high": PROMPT_LOW + PROMPT_BINS - 1,
        "output_low": OUTPUT_LOW, "output_high": OUTPUT_LOW + OUTPUT_BINS - 1,
    }  # fmt: skip
    cells, names = columns(db, "hourly_cells", {**edges, **times}), columns(db, "hourly_names", times)
    if not len(cells["hour"]):
        raise UserError("traffic log", "has no good rows", "see the reasons with `tideforge ingest`")
    first, hours = int(cells["hour"].min()), int(np.ptp(cells["hour"])) + 1
    regions = sorted({str(region) for region in cells["region"]} - {""})
    place = {region: number + 1 for number, region in enumerate(regions)}
    scope = np.array([place.get(str(region), 0) for region in cells["region"]])
    joint = np.zeros((hours, len(regions) + 1, PROMPT_BINS, OUTPUT_BINS), dtype=np.int64)
    cached = np.zeros((hours, len(regions) + 1, CACHED_BINS), dtype=np.int64)
    row, told = cells["hour"] - first, cells["cached_bin"] >= 0
    for target, mine in ((np.zeros_like(scope), scope >= 0), (scope, scope > 0)):  # no region: counts for `all` alone
        cell = (row[mine], target[mine], cells["prompt_bin"][mine], cells["output_bin"][mine])
        np.add.at(joint, cell, cells["requests"][mine])
        kept = mine & told
        np.add.at(cached, (row[kept], target[kept], cells["cached_bin"][kept]), cells["requests"][kept])
    scopes_named = (ALL, *(f"region {region}" for region in regions))
    return Hourly(first, scopes_named, joint, cached, tuple(named_of(names, first, hours)))


def named_of(rows: dict[str, NDArray[Any]], first: int, hours: int) -> list[Named]:
    found = []
    for kind in ("region", "tenant", "model"):
        mine = np.array([each == kind for each in rows["kind"]], dtype=bool)
        labels = [str(name) for name in rows["name"][mine]]
        names = tuple(sorted(set(labels)))
        place = {name: number for number, name in enumerate(names)}
        counts = np.zeros((hours, len(names)), dtype=np.int64)
        counts[rows["hour"][mine] - first, [place[label] for label in labels]] = rows["requests"][mine]
        found.append(Named(kind, names, counts))
    return found


def columns(db: duckdb.DuckDBPyConnection, name: str, values: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Columns of data/sql/<name>.sql."""
    query = (resources.files("tideforge.data") / "sql" / f"{name}.sql").read_text()
    result = db.execute(query, values)
    return {column: np.asarray(found) for column, found in result.fetchnumpy().items()}
