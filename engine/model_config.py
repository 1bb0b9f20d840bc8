"""Figures of a model under the names of Hugging Face's config.json, without torch. What no forward here has is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tideforge.errors import UserError

# Architecture -> folder of its raw forward under engine/models. Kimi-K2 calls itself DeepseekV3ForCausalLM.
RAW = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "MixtralForCausalLM": "moe",
    "Qwen2MoeForCausalLM": "moe",
    "Qwen3MoeForCausalLM": "moe",
    "DeepseekV3ForCausalLM": "mla",
}
ROPE_TYPES = ("default", "llama3", "yarn")


def model_for(architecture: str) -> Path:
    """The folder of an architecture's raw forward. Raises UserError for one that is not known."""
    if architecture not in RAW:
        raise UserError(architecture, "is an architecture without a raw forward here", f"there are {', '.join(RAW)}")
    return Path(__file__).parent / "models" / RAW[architecture]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the context that a model was first trained with (`rope_scaling`)."""

    rope_type: str  # "llama3" or "yarn"
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def stretched(self, plain: tuple[float, ...], theta: float) -> tuple[float, ...]:
        if self.rope_type == "llama3":
            return tuple(self._llama3(frequency) for frequency in plain)
        return self._yarn(plain, theta)

    def _llama3(self, frequency: float) -> float:
        """Long waves are slowed by `factor`, short ones left alone, those between blended by turns in the first context."""
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        return kept * frequency + (1 - kept) * frequency / self.factor

    def _yarn(self, plain: tuple[float, ...], theta: float) -> tuple[float, ...]:
        """As llama3, but blended along the index of the pair, between those that turn beta_fast and beta_slow times."""
        size = 2 * len(plain)

        def index(turns: float) -> float:
            return (
                size * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            )

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low or 0.001
        slowed = [min(1.0, max(0.0, (i - low) / width)) for i in range(len(plain))]
        return tuple(f * (1 - s) + f / self.factor * s for f, s in zip(plain, slowed, strict=True))

    def magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rotation_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture figures. Names are config.json's; of synonyms the first one that was there."""

    architecture: str
    vocab_size: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # with latent attention qk_rope_head_dim: what the rotary positions turn
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False  # on q_proj, k_proj and v_proj: Qwen2
    qk_norm: bool = False  # an RMS norm of each head of q and k before rotation: Qwen3
    # Mixture of experts; num_local_experts 0: dense
    num_local_experts: int = 0  # num_experts, n_routed_experts
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # the chosen experts' shares are rescaled to sum to one
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    first_k_dense_replace: int = 0
    shared_expert_intermediate_size: int = 0  # Qwen2-MoE: one shared expert behind a sigmoid gate
    n_shared_experts: int = 0  # DeepSeek-V3: ungated, as wide as so many experts
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    # Latent attention; kv_lora_rank 0: plain attention
    q_lora_rank: int = 0  # 0: queries are not compressed
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = False  # pairs that turn together are neighbours, not halves apart

    def is_sparse(self, layer: int) -> bool:
        """Does this layer have experts?"""
        if layer < self.first_k_dense_replace or layer in self.mlp_only_layers:
            return False
        return self.num_local_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def rope_frequencies(self) -> tuple[float, ...]:
        """Radians a position of each pair of a head's dimensions, head_dim / 2 of them."""
        plain = tuple(self.rope_theta ** (-i / self.head_dim) for i in range(0, self.head_dim, 2))
        return self.rope_scaling.stretched(plain, self.rope_theta) if self.rope_scaling else plain

    @property
    def rope_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return self.rope_scaling.rotation_factor if self.rope_scaling else 1.0

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before softmax."""
        if not self.kv_lora_rank:
            return float(self.head_dim**-0.5)
        scaling, scale = self.rope_scaling, float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)
        return scale * scaling.magnitude(scaling.mscale_all_dim) ** 2 if scaling and scaling.mscale_all_dim else scale

    @property
    def page_heads(self) -> int:
        """Heads of a token in the KV cache: latent attention caches what all heads share."""
        return 1 if self.kv_lora_rank else self.num_key_value_heads

    @property
    def key_dim(self) -> int:
        """Of the keys in the cache; with latent attention the compressed keys and values, normed."""
        return self.kv_lora_rank or self.head_dim

    @property
    def value_dim(self) -> int:
        """Of the values in the cache; with latent attention the rotated part of the keys."""
        return self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Raises UserError that names the architecture or feature when no raw forward here has it."""
        architecture = raw["architectures"][0]
        model_for(architecture)
        if problems := list(_unsupported(architecture, raw)):
            raise UserError(source, f"asks for {', '.join(problems)}", "not supported; take another checkpoint")
        heads, eos = raw["num_attention_heads"], raw.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=_head_dim(raw),
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(raw.get("rope_theta") or _rope(raw).get("rope_theta") or 10000.0),
            max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            rope_scaling=_rope_scaling(raw),
            qkv_bias=architecture == "Qwen2ForCausalLM"
            or (architecture == "Qwen2MoeForCausalLM" and bool(raw.get("qkv_bias", True))),
            qk_norm=architecture.startswith("Qwen3"),
            **_experts(architecture, raw),
            **_latent(raw),
        )

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Raises UserError when the folder has no readable config.json, or one that no forward here can follow."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
            config = cls.from_dict(raw, str(path))
        except FileNotFoundError:
            raise UserError(
                str(path), "does not exist", "give a model folder (`tideforge weights` makes one)"
            ) from None
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                str(path), f"is not a model config ({error!r})", "take config.json of the checkpoint"
            ) from None
        if method := (raw.get("quantization_config") or {}).get("quant_method"):
            raise UserError(str(path), f"has a quantization_config ({method})", "convert the weights to bfloat16 first")
        return config


def _head_dim(raw: Mapping[str, Any]) -> int:
    if raw.get("kv_lora_rank"):
        return int(raw["qk_rope_head_dim"])
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """rope_scaling, or what newer releases of transformers write in its place."""
    return {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}


def _rope_type(raw: Mapping[str, Any]) -> str:
    rope = _rope(raw)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rope_scaling(raw: Mapping[str, Any]) -> RopeScaling | None:
    rope = _rope(raw)
    if _rope_type(raw) == "default":
        return None
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = original or raw["max_position_embeddings"]
    optional = {f.name for f in dataclasses.fields(RopeScaling)} - {"rope_type", "original_max_position_embeddings"}
    given = {name: value for name, value in rope.items() if name in optional and value is not None}
    factor = given.pop("factor", raw["max_position_embeddings"] / original)
    return RopeScaling(_rope_type(raw), float(factor), int(original), **given)


def _experts(architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    count = raw.get("num_local_experts") or raw.get("num_experts") or raw.get("n_routed_experts") or 0
    if not count:
        return {}
    normed = architecture in ("MixtralForCausalLM", "DeepseekV3ForCausalLM")
    names = ("first_k_dense_replace", "shared_expert_intermediate_size", "n_shared_experts")
    return {
        "num_local_experts": count,
        "num_experts_per_tok": raw["num_experts_per_tok"],
        "moe_intermediate_size": raw.get("moe_intermediate_size") or raw["intermediate_size"],
        "norm_topk_prob": bool(raw.get("norm_topk_prob", normed)),
        "mlp_only_layers": tuple(raw.get("mlp_only_layers") or ()),
        "decoder_sparse_step": raw.get("decoder_sparse_step") or 1,
        "n_group": raw.get("n_group") or 1,
        "topk_group": raw.get("topk_group") or 1,
        "routed_scaling_factor": float(raw.get("routed_scaling_factor") or 1.0),
        **{name: raw.get(name) or 0 for name in names},
    }


def _latent(raw: Mapping[str, Any]) -> dict[str, Any]:
    if not raw.get("kv_lora_rank"):
        return {}
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    interleave = bool(raw.get("rope_interleave", True))
    return {name: raw[name] for name in names} | {
        "q_lora_rank": raw.get("q_lora_rank") or 0,
        "rope_interleave": interleave,
    }


def _unsupported(architecture: str, raw: Mapping[str, Any]) -> Iterator[str]:
    """Whatever would change the arithmetic and no raw forward here does."""
    rope = _rope(raw)
    if raw.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {raw['hidden_act']}"
    if raw.get("attention_bias") and not architecture.startswith("Qwen2"):
        yield "attention_bias (a bias on o_proj)"
    if raw.get("mlp_bias"):
        yield "mlp_bias"
    windowed = raw.get("use_sliding_window") if architecture.startswith("Qwen") else raw.get("sliding_window")
    if windowed or set(raw.get("layer_types") or ()) - {"full_attention"}:
        yield "a sliding window"
    if any(isinstance(value, Mapping) for value in rope.values()):
        yield "rotary positions that differ by layer"
    elif _rope_type(raw) not in ROPE_TYPES:
        yield f"rope type {_rope_type(raw)}"
    if (raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        yield "partial_rotary_factor"
    for name, wanted in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("moe_layer_freq", 1)):
        if architecture == "DeepseekV3ForCausalLM" and raw.get(name, wanted) != wanted:
            yield f"{name} {raw[name]}"
    if architecture == "DeepseekV3ForCausalLM" and not raw.get("kv_lora_rank"):
        yield "attention without kv_lora_rank"
