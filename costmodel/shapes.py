"""Model shapes: what a model weighs, what a token computes and what its KV cache holds, from its config.json."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tideforge.costmodel import hfconfig
from tideforge.costmodel.hfconfig import Attention, Experts
from tideforge.errors import UserError

# Bytes a weight or KV element, block scales included: fp8 by 128x128 blocks (negligible), fp4 and int4 a scale byte per 16
# (NVFP4, OCP MX uses 32) and per 32 elements.
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.53125}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Architecture figures that decide bytes and arithmetic. Parameters leave out norms and biases (below 0.1 %)."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # 1 for latent attention
    ffn: int  # width of a dense layer
    vocab: int
    max_len: int
    tied: bool
    attention: tuple[Attention, ...]
    experts: Experts | None
    precision: str  # of the checkpoint's weights
    weight_block: int  # width of a quantisation block that a shard may not cut, 0: none
    source: str
    assumed: tuple[str, ...] = ()

    @property
    def latent(self) -> bool:
        """Latent attention keeps one vector a token for all heads: tensor parallel ranks replicate it."""
        return any(group.latent for group in self.attention)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def attention_parameters(self) -> int:
        return sum(group.layers * group.parameters for group in self.attention)

    @property
    def dense_ffn_parameters(self) -> int:
        """Gated: three matrices a layer."""
        return self.dense_layers * 3 * self.hidden * self.ffn

    @property
    def shared_parameters(self) -> int:
        """What every token of a mixture layer uses: shared experts, router, projections to latent experts."""
        if self.experts is None:
            return 0
        e = self.experts
        latent = 2 * self.hidden * e.hidden if e.hidden != self.hidden else 0
        return self.moe_layers * (3 * self.hidden * e.shared_width + self.hidden * e.routed + latent)

    @property
    def expert_parameters(self) -> int:
        """One routed expert of one layer."""
        return 3 * self.experts.hidden * self.experts.width if self.experts else 0

    @property
    def routed_parameters(self) -> int:
        return self.moe_layers * self.experts.routed * self.expert_parameters if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def total_parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        blocks = self.attention_parameters + self.dense_ffn_parameters + self.shared_parameters + self.routed_parameters
        return embeddings + blocks

    @property
    def active_parameters(self) -> int:
        """Parameters one token is multiplied with, embeddings counted as in `total_parameters`."""
        unused = self.experts.routed - self.experts.per_token if self.experts else 0
        return self.total_parameters - self.moe_layers * unused * self.expert_parameters

    @property
    def common_precision(self) -> str:
        """Of attention, dense layers and shared experts: 4-bit mixture checkpoints quantise the routed experts alone."""
        return "bf16" if self.experts and self.precision in ("fp4", "int4") else self.precision

    def weight_bytes(self, common: str, experts: str | None = None) -> float:
        """All weights; embeddings and head stay in bf16 below 2 bytes a weight, as published checkpoints keep them."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        rest = self.total_parameters - embeddings - self.routed_parameters
        routed = self.routed_parameters * BYTES[experts or common]
        return rest * BYTES[common] + routed + embeddings * max(BYTES[common], 2.0)

    def kv_elements(self, context: float) -> float:
        """Elements one sequence of `context` tokens keeps, all layers; recurrent state included."""
        return sum(group.layers * group.stored(context) for group in self.attention)

    def kv_read_elements(self, context: float) -> float:
        """Elements one decoding sequence reads a step."""
        return sum(group.layers * group.read(context) for group in self.attention)

    def kv_bytes_per_token(self, precision: str, context: float = 4096) -> float:
        """Mean KV bytes a token of a sequence of `context` tokens (sliding windows and state make it depend on it)."""
        return self.kv_elements(context) / context * BYTES[precision]


def from_config(raw: Mapping[str, Any], name: str, source: str, assumed: tuple[str, ...] = ()) -> ModelShape:
    """From the fields of a config.json. Raises UserError naming the file or model and the field that is missing."""
    try:
        fields = hfconfig.fields(raw)
        shape = ModelShape(name=name, source=source, assumed=assumed, **fields)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        what = f"has no field {error}" if isinstance(error, KeyError) else f"has a bad field ({error})"
        raise UserError(source, what, "give the config.json of a decoder-only language model") from None
    if min(shape.layers, shape.hidden, shape.heads, shape.vocab, shape.kv_heads) <= 0:
        raise UserError(source, "has a count of zero or less", "give the config.json of a decoder-only language model")
    return shape


def read_config(path: Path) -> ModelShape:
    """A config.json or the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(
            str(file), "does not exist", "give a folder with config.json, or a name of data/model_shapes.json"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(str(file), f"is not JSON ({error})", "give the model's config.json") from None
    if not isinstance(raw, dict):
        raise UserError(str(file), "is not a JSON object", "give the model's config.json")
    return from_config(
        raw, name=file.parent.resolve().name if file.name == "config.json" else file.stem, source=str(file)
    )


@functools.cache
def catalogue() -> dict[str, ModelShape]:
    """The shapes that come with the package, by name."""
    text = (resources.files("tideforge.data") / "model_shapes.json").read_text()
    entries = json.loads(text)["models"].items()
    return {name: from_config(raw["config"], name, raw["source"], tuple(raw["assumed"])) for name, raw in entries}


def get(name: str) -> ModelShape:
    """A path to a config.json (or its folder), or a name, with or without owner and precision suffix."""
    path = Path(name)
    if path.exists() or name.endswith(".json"):
        return read_config(path)
    known = {key.lower(): shape for key, shape in catalogue().items()}
    short = name.rsplit("/", 1)[-1].lower()
    for key in (short, *(short.removesuffix(suffix) for suffix in ("-fp8", "-fp4", "-nvfp4", "-instruct", "-0528"))):
        if key in known:
            return known[key]
    near = [known[match].name for match in difflib.get_close_matches(short, known, n=4, cutoff=0.4)]
    remedy = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(catalogue())}"
    raise UserError(f"model {name!r}", "is neither a config.json nor a known name", f"give --config FILE; {remedy}")
