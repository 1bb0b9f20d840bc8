"""What a step's experts cost: bytes moved and seconds, and how wrong a trial is that moves those of other tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.costmodel import hardware, shapes
from tideforge.costmodel.coefficients import Coefficients
from tideforge.costmodel.hardware import Hardware
from tideforge.costmodel.layouts import Layout
from tideforge.costmodel.memory import Precision
from tideforge.costmodel.passes import Load, Setting, coverage, price
from tideforge.costmodel.shapes import ModelShape
from tideforge.engine.model_config import ModelConfig
from tideforge.engine.possible import floor_s
from tideforge.engine.random_shapes import SHAPES

DTYPE, PRECISION = "bfloat16", "bf16"
LARGE = "qwen3-30b-a3b"
EVEN = Coefficients(expert_skew=0.0)  # whose router spreads evenly
SAVED = 0.2  # of the experts' reads, by an imagined candidate
REPORTED = (
    1.13,
    1.38,
)  # experts of random tokens over those of real ones, as Together reports them for models of its own choice


@dataclasses.dataclass(frozen=True)
class Model:
    """A mixture of experts in bf16 on one device; `context` tokens a sequence."""

    config: ModelConfig
    shape: ModelShape
    hardware: Hardware
    context: int = 1024

    @classmethod
    def of_folder(cls, folder: Path, hardware_name: str) -> Model:
        return cls(ModelConfig.load(folder), shapes.read_config(folder), hardware.get(hardware_name))

    @classmethod
    def large(cls, hardware_name: str) -> Model:
        raw: Mapping[str, Any] = SHAPES[LARGE]
        return cls(ModelConfig.from_dict(raw), shapes.from_config(raw, LARGE, LARGE), hardware.get(hardware_name))

    def even(self, tokens: int) -> float:
        return coverage(self.config.num_local_experts, self.config.num_experts_per_tok, tokens)

    def expert_bytes(self, experts: float) -> float:
        """Of `experts` in each layer that has a mixture."""
        return self.shape.moe_layers * experts * self.shape.expert_parameters * 2

    def weight_bytes(self, experts: float) -> float:
        """That a step must move: the floor's for one token (engine/possible.py), and the experts that others add."""
        one = floor_s(self.config, DTYPE, int(self.shape.weight_bytes(PRECISION)), 1.0, 0)
        return one + self.expert_bytes(experts - self.config.num_experts_per_tok)

    def terms(self, tokens: int, experts: float) -> dict[str, float]:
        """The cost model's seconds of a decode step by name, with `experts` a layer in place of its evenly spreading router."""
        setting = Setting(Layout(), self.shape, self.hardware, Precision(*(PRECISION,) * 3), EVEN)
        terms = price(setting, Load.decode(tokens, self.context))
        share = experts / self.even(tokens)
        return {term.name: term.seconds * (share if term.name == "experts read" else 1.0) for term in terms}


@dataclasses.dataclass(frozen=True)
class Misled:
    """A trial with other tokens beside one with real ones. Ratios are other over real; `gain`s are what a candidate that saves
    SAVED of the experts' reads would be measured at."""

    tokens: int
    real: float  # experts a layer
    other: float
    weight_bytes: float  # ratio; also that of the floor's seconds, which are these bytes over a bandwidth
    step: float  # ratio of seconds by the cost model
    gain_real: float
    gain_other: float

    @classmethod
    def of(cls, model: Model, tokens: int, real: float, other: float) -> Misled:
        a, b = model.terms(tokens, real), model.terms(tokens, other)
        return cls(
            tokens, real, other,
            weight_bytes=model.weight_bytes(other) / model.weight_bytes(real),
            step=sum(b.values()) / sum(a.values()),
            gain_real=gain(a), gain_other=gain(b),
        )  # fmt: skip


def gain(terms: Mapping[str, float]) -> float:
    """Of a candidate that saves SAVED of the experts' reads."""
    whole = sum(terms.values())
    return whole / (whole - SAVED * terms["experts read"])


def carried_over(model: Model, tokens: int, real: float, other: float) -> Misled:
    """As if on `model` the same shares of what an even router activates were activated: `real` and `other` are such shares."""
    return Misled.of(model, tokens, *(share * model.even(tokens) for share in (real, other)))


def as_reported(model: Model, tokens: int, excess: float) -> Misled:
    """As if random tokens spread evenly and real ones activated that much less, but no fewer than one token does."""
    real = max(model.even(tokens) / excess, model.config.num_experts_per_tok)
    return Misled.of(model, tokens, real, model.even(tokens))
