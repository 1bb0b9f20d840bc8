"""What the profile of a traffic log takes in pandas, written plainly: the baseline of bench_traffic.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from tideforge.data.profile import PROBABILITIES


def pandas_profile(paths: Sequence[Path]) -> int:
    """Checks, duplicates, quantiles, histograms, groups, arrivals and concurrency; returns the requests kept."""
    rows = pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)
    good = rows["request_id"].ne("") & rows["prompt_tokens"].between(1, 10**8) & rows["output_tokens"].between(1, 10**8)
    good &= rows["cached_tokens"].between(0, rows["prompt_tokens"]) & rows["latency_ms"].between(0, 1e9)
    rows = rows[good].sort_values(["arrival", "prompt_tokens", "output_tokens"]).drop_duplicates("request_id")
    rows["context"] = rows["prompt_tokens"] + rows["output_tokens"]
    for name in ("prompt_tokens", "output_tokens", "context", "cached_tokens", "ttft_ms", "latency_ms"):
        rows[name].quantile(PROBABILITIES, interpolation="lower")
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        rows[f"{name}_bin"] = np.floor(4 * np.log2(rows[name].clip(lower=1))).astype(int)
    rows["hour"] = rows["arrival"].dt.hour
    rows.groupby(["prompt_tokens_bin", "output_tokens_bin", "cached_tokens_bin"]).size()
    for kind in ("region", "model"):
        rows.groupby([kind, "prompt_tokens_bin", "output_tokens_bin"]).size()
    for kind in ("region", "model", "tenant", "hour"):
        rows.groupby(kind)[["prompt_tokens", "output_tokens"]].quantile([0.5, 0.9])
    start = rows["arrival"].astype("int64")
    start.diff().agg(["mean", "std"])
    rows.groupby(rows["arrival"].dt.floor("min")).size()
    latency, ttft = ((rows[name] * 1000).astype("int64") for name in ("latency_ms", "ttft_ms"))
    for begin in (start, start + ttft):
        in_flight(begin, start + latency)
    return len(rows)


def in_flight(start: pd.Series[int], end: pd.Series[int]) -> pd.Series[float]:
    """Time held at each level, by hour."""
    changes = pd.concat([pd.Series(1, index=start), pd.Series(-1, index=end)]).sort_index()
    level, at = changes.cumsum(), changes.index.to_series()
    held = at.diff().shift(-1)
    return held.groupby([at // 3_600_000_000 % 24, level]).sum()
