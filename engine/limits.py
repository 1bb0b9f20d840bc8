"""The measured limits of honest forwards' noise, as data/thresholds.json holds them (gates/thresholds.py writes it)."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from tideforge.engine import compare
from tideforge.engine.compare import SAFETY, Bounds, Noise
from tideforge.engine.model_config import ModelConfig

FILE = Path(__file__).parents[1] / "data" / "thresholds.json"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Most that an honest forward shows, over what the reference's own orders make on the same tokens."""

    kl_median: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    logit_max: float  # over that of Reference.noise, which looks at other, fewer tokens
    deviations: float  # of a matched filter's share, in its standard errors


def kind(config: ModelConfig) -> str:
    """Of a model, as far as noise goes: close choices of a router make it heavy-tailed."""
    sparse = any(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    return "sparse" if sparse else "dense"


@functools.cache
def _every() -> dict[str, Limits]:
    return {key: Limits(**figures) for key, figures in json.loads(FILE.read_text())["limits"].items()}


def limits(dtype: str, model: str) -> Limits:
    """At a precision, of a kind of model. What was not measured at float16 is taken from bfloat16, which rounds more coarsely."""
    return _every()[f"{'bfloat16' if dtype == 'float16' else dtype}/{model}"]


def safety(dtype: str, model: str) -> float:
    """SAFETY, or less where less was measured. Not in fp32: noise there grows with the length of a chain of additions, and
    models may have longer ones than those measured; in 16 bits rounding of results outweighs it."""
    return SAFETY if dtype == "float32" else min(SAFETY, limits(dtype, model).logit_max)


def bounds(noise: Noise, model: str) -> Bounds:
    """Of a forward of that kind of model. A logit alone may be off by more than SAFETY where a router's choice went the other
    way; an emitted token may not: for it to be chosen wrongly by that much, a rival must gain what it loses, on the same row."""
    times = max(safety(noise.dtype, model), limits(noise.dtype, model).logit_max)
    return dataclasses.replace(compare.bounds(noise, safety(noise.dtype, model)), logit=times * noise.logit_max)
