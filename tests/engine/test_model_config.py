"""config.json of published models, written out here; what is not supported is refused by name, never ignored."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tideforge.engine import doubles
from tideforge.engine.config import ModelConfig, Settings
from tideforge.engine.model_config import RAW, model_for
from tideforge.engine.reference_rope import rope, yarn_temperature
from tideforge.errors import UserError

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_8B, "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
    "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "eos_token_id": 163585, "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
# A longer context by yarn as Qwen's cards tell to ask for it: no mscale, so cos and sin grow.
QWEN3_8B_LONG = {
    **QWEN3_8B, "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}  # fmt: skip
PUBLISHED = {
    "Llama-3.2-1B": LLAMA_1B, "Qwen2-7B": QWEN2_7B, "Qwen3-8B": QWEN3_8B, "Qwen3-8B, 128k": QWEN3_8B_LONG,
    "Qwen3-30B-A3B": QWEN3_30B_A3B, "Mixtral-8x7B": MIXTRAL_8X7B, "DeepSeek-V3": DEEPSEEK_V3, "Kimi-K2": KIMI_K2,
}  # fmt: skip


def test_figures_of_published_models() -> None:
    found = {name: ModelConfig.from_dict(raw) for name, raw in PUBLISHED.items()}
    assert found["Llama-3.2-1B"].eos_token_ids == (128001, 128008, 128009)
    assert found["Llama-3.2-1B"].tie_word_embeddings and not found["Llama-3.2-1B"].qkv_bias
    qwen2, qwen3 = found["Qwen2-7B"], found["Qwen3-8B"]
    assert qwen2.qkv_bias and not qwen2.qk_norm and qwen2.head_dim == 128
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.num_local_experts == 0
    moe = found["Qwen3-30B-A3B"]
    assert (moe.num_local_experts, moe.num_experts_per_tok, moe.moe_intermediate_size) == (128, 8, 768)
    assert moe.head_dim * moe.num_attention_heads == 2 * moe.hidden_size and moe.norm_topk_prob
    assert found["Mixtral-8x7B"].norm_topk_prob and found["Mixtral-8x7B"].moe_intermediate_size == 14336
    deepseek, kimi = found["DeepSeek-V3"], found["Kimi-K2"]
    assert (deepseek.page_heads, deepseek.key_dim, deepseek.value_dim) == (1, 512, 64)
    assert (deepseek.n_group, deepseek.topk_group, kimi.n_group) == (8, 4, 1)
    assert [deepseek.is_sparse(i) for i in range(5)] == [False, False, False, True, True]
    assert deepseek.rope_interleave and deepseek.rope_factor == 1.0
    assert kimi.routed_scaling_factor == 2.827 and kimi.num_local_experts == 384


@pytest.mark.parametrize("name", PUBLISHED)
def test_rotary_positions_and_scale_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = copy.deepcopy(PUBLISHED[name]) | {"quantization_config": None}
    kind = raw.pop("model_type").replace("kimi_k2", "deepseek_v3")
    theirs = AutoConfig.for_model(kind, **{**copy.deepcopy(raw), "num_hidden_layers": 1})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs).model
    layer, attention = type(model.rotary_emb), model.layers[0].self_attn
    rotary = layer(theirs)
    ours = ModelConfig.from_dict(raw)
    torch.testing.assert_close(torch.tensor(ours.rope_frequencies), rotary.inv_freq, rtol=2e-6, atol=0)
    assert ours.rope_factor == pytest.approx(rotary.attention_scaling)
    assert ours.attention_scale == pytest.approx(attention.scaling)
    turning, factor = rope(ours)  # the reference's own arithmetic
    torch.testing.assert_close(turning.float(), rotary.inv_freq, rtol=2e-6, atol=0)
    assert factor == pytest.approx(rotary.attention_scaling)
    size = ours.qk_nope_head_dim + ours.head_dim if ours.kv_lora_rank else ours.head_dim
    assert size**-0.5 * yarn_temperature(ours) == pytest.approx(attention.scaling)


def test_which_layers_have_experts() -> None:
    config = ModelConfig.from_dict({**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [config.is_sparse(i) for i in range(6)] == [False, True, False, False, False, True]
    assert not any(ModelConfig.from_dict(QWEN3_8B).is_sparse(i) for i in range(36))


REFUSED = {
    "GptOssForCausalLM": {"architectures": ["GptOssForCausalLM"]},
    "a sliding window": {"architectures": ["MixtralForCausalLM"], "sliding_window": 4096},
    "sliding window": {"use_sliding_window": True, "sliding_window": 4096},
    "window": {"layer_types": ["full_attention", "sliding_attention"]},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"architectures": ["LlamaForCausalLM"], "mlp_bias": True},
    "hidden_act gelu": {"hidden_act": "gelu"},
    "rope type dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "differ by layer": {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "scoring_func softmax": {**DEEPSEEK_V3, "scoring_func": "softmax"},
    "topk_method greedy": {**DEEPSEEK_V3, "topk_method": "greedy"},
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_is_not_supported_is_refused_by_name(feature: str) -> None:
    ModelConfig.from_dict(QWEN3_8B)
    with pytest.raises(UserError, match=feature):
        ModelConfig.from_dict({**QWEN3_8B, **REFUSED[feature]})


def test_quantised_weights_are_refused_when_a_folder_is_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    with pytest.raises(UserError, match=r"quantization_config \(fp8\)"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V3, "quantization_config": None}))
    assert ModelConfig.load(tmp_path).kv_lora_rank == 512


def test_every_known_architecture_has_a_raw_forward_and_a_double(tmp_path: Path) -> None:
    made = {name: ModelConfig.load(make(tmp_path / name, layers=2)) for name, make in doubles.DOUBLES.items()}
    assert {config.architecture for config in made.values()} == set(RAW)
    assert all((model_for(architecture) / "forward.py").is_file() for architecture in RAW)


def test_pages_of_latent_attention_are_laid_out_one_after_another(tmp_path: Path) -> None:
    config = ModelConfig.load(doubles.tiny_deepseek(tmp_path))
    layout = Settings(tmp_path, tmp_path, num_blocks=4, block_size=2).arena_layout(config)
    assert layout.page_shape(values=False) == (4, 2, 1, 32) and layout.page_shape(values=True) == (4, 2, 1, 8)
    ends = [
        (layout.plane_offset(layer, values), layout.plane_bytes(values))
        for layer in range(3)
        for values in (False, True)
    ]
    assert [at for at, _ in ends] == [sum(size for _, size in ends[:i]) for i in range(6)]
    assert layout.pages_bytes == sum(size for _, size in ends) <= layout.logits_offset
