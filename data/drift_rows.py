"""Requests as rows for made histograms, so that `bench_drift` also goes the whole way from Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tideforge.data.hourly import CACHED_BINS, OUTPUT_LOW, PROMPT_LOW, Hourly

COLUMNS = ("request_id", "arrival", "prompt_tokens", "output_tokens", "cached_tokens", "region", "tenant")


def write_rows(traffic: Hourly, seed: int, target: Path) -> int:
    """One row a request of `traffic`, in random places of its bins; the number of rows. Regions and tenants must be told."""
    rng = np.random.default_rng(seed)
    regions, tenants = traffic.named[0], traffic.named[1]
    joint = traffic.joint[:, 1:]
    cells = np.argwhere(joint)
    hour, region, prompt, output = np.repeat(cells, joint[tuple(cells.T)], axis=0).T
    count = len(hour)
    prompts = np.floor(2.0 ** (PROMPT_LOW + prompt) * (1 + rng.random(count))).astype(np.int64)
    outputs = np.floor(2.0 ** (OUTPUT_LOW + output) * (1 + rng.random(count))).astype(np.int64)
    fifth = dealt(rng, traffic.cached[:, 1:].reshape(-1, CACHED_BINS))
    columns = [
        pa.array([f"{seed}-{number}" for number in range(count)]),
        pa.array((traffic.first_hour + hour) * 3_600_000_000 + rng.integers(0, 3_600_000_000, count)).cast(
            pa.timestamp("us", tz="UTC")
        ),
        pa.array(prompts),
        pa.array(outputs),
        pa.array(-(-fifth * prompts // CACHED_BINS)),
        pa.array(np.array(regions.names)[region]),
        pa.array(np.array(tenants.names)[dealt(rng, tenants.counts)]),
    ]
    pq.write_table(pa.table(columns, names=COLUMNS), target, compression="zstd")
    return count


def dealt(rng: np.random.Generator, counts: np.ndarray) -> np.ndarray:
    """[rows] a column's number as often as `counts` [groups, columns] says, group by group, shuffled within each."""
    column = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    group = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
    return np.asarray(column[np.lexsort((rng.random(len(column)), group))])
