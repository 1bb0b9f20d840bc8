"""The floor: the least seconds that one step can take. Faster is an error of the measurement, not a win."""

from __future__ import annotations

from tideforge.engine.memory import ITEM_BYTES
from tideforge.engine.model_config import ModelConfig


def floor_s(
    config: ModelConfig, dtype: str, weights_bytes: int, bandwidth_bytes_per_s: float | None, cache_bytes: int
) -> float:
    """Weights that a step of one token must move, less what the cache can hold, over the spec sheet's bandwidth; 0 without one.

    Of the embedding table a step needs a row, of the experts of a sparse layer those that one token chooses.
    """
    if bandwidth_bytes_per_s is None:
        return 0.0
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * ITEM_BYTES[dtype]
    must = weights_bytes - table - idle_expert_bytes(config, dtype) - cache_bytes
    return max(0.0, must / bandwidth_bytes_per_s)


def idle_expert_bytes(config: ModelConfig, dtype: str) -> int:
    """Of the experts that one token leaves alone, all layers together."""
    sparse = sum(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    each = 3 * config.hidden_size * config.moe_intermediate_size * ITEM_BYTES[dtype]
    return sparse * max(0, config.num_local_experts - config.num_experts_per_tok) * each
