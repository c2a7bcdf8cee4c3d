"""Provides small transformers models of each family whose FLOPs wlb counts."""

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 8),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "intermediate_size_mlp": 128,
    # Windows.
    "sliding_window": 48,
    "attention_chunk_size": 64,
    # Experts.
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 80,
    "moe_shared_expert_intermediate_size": 48,
    "first_k_dense_replace": 2,
    "num_dense_layers": 2,
    "moe_layer_start_index": 2,
    # Latent and sparse attention.
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_topk": 32,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # Linear attention and recurrences. Each head has its own group, because transformers' code
    # repeats B and C over heads.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "block_size": 64,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "mamba_n_groups": 8,
    "n_groups": 8,
    "mamba_chunk_size": 64,
    "chunk_size": 64,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "attn_layer_indices": [2, 5],
    "full_attn_idxs": [1, 4],
    "block_multiple_of": 16,
}
_ALL_HEADS = {"num_key_value_heads": 4}
"""Latent attention has keys and values for every head."""
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
ALSO: dict[str, dict[str, Any]] = {
    "deepseek_v2": _ALL_HEADS,
    "deepseek_v3": _ALL_HEADS,
    "deepseek_v32": _ALL_HEADS,
    "glm4_moe_lite": _ALL_HEADS,
    "glm_moe_dsa": {**_ALL_HEADS, "indexer_types": ["full", "full", "shared", "full"] * 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 4},
    "kimi_linear": _ALL_HEADS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "minicpm3": _ALL_HEADS,
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2},
    "qwen2_5_vl_text": {"rope_parameters": _ROPE},
    "qwen2_vl_text": {"rope_parameters": _ROPE},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 5},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 3},
    "smollm3": {"use_sliding_window": True},
    "youtu": _ALL_HEADS,
}
"""Further settings of a family, on top of `SMALL`."""


def small_config(model_type: str, **changed: Any) -> PreTrainedConfig:
    """Returns a small configuration of a family, without settings that it does not have."""
    made = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(made)}
    values = {**SMALL, **ALSO.get(model_type, {}), **changed}
    return made(**{name: value for name, value in values.items() if name in known})


def small_model(config: PreTrainedConfig) -> torch.nn.Module:
    """Returns a random model with eager attention and eager experts."""
    torch.manual_seed(0)
    is_lm = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    made = AutoModelForCausalLM if is_lm else AutoModel
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return made.from_config(config, **options).eval()


def has_head(config: PreTrainedConfig) -> bool:
    """Returns whether `small_model` has an output head.

    Language models that are part of an image model have none.
    """
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
