"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any

GEMMA_2: dict[str, Any] = {
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "attention_logit_soft_cap": 50.0,
    "final_logit_soft_cap": 30.0,
    "use_sliding_window_attention": True,
    "sliding_window_size": 4096,
    "sliding_window_pattern": 2,
}
GEMMA_3: dict[str, Any] = {
    "use_query_key_norm": True,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_sliding_window_attention": True,
    "sliding_window_size": 1024,
    "sliding_window_pattern": 6,
    "global_rope_wavelength": 1_000_000.0,
    "gate_dim_reduction": 1,
}
GEMMA_4: dict[str, Any] = {
    "use_query_key_norm": True,
    "use_value_norm": True,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_layer_scalar": True,
    "norm_offset": 0.0,
    "query_pre_attention_scalar": 1.0,
    "use_sliding_window_attention": True,
    "sliding_window_size": 512,
    "sliding_window_pattern": 6,
    "global_rope_wavelength": 1_000_000.0,
    "global_rope_partial_rotary_factor": 0.25,
    "gate_dim_reduction": 1,
}


def _size(
    vocabulary: int, layers: int, heads: int, groups: int, width: int, intermediate: int, head: int
) -> dict[str, Any]:
    return {
        "vocabulary_size": vocabulary,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": groups,
        "hidden_dim": width,
        "intermediate_dim": intermediate,
        "head_dim": head,
    }


def _dense(*widths: int) -> list[dict[str, Any]]:
    return [{"units": width, "use_bias": False} for width in widths]


# Below 100,000 parameters, with grouped-query attention and windows shorter than test inputs.
_DEBUG = (320, 2, 4, 2, 32)
_LONG_CONTEXT = {"global_rope_scaling_factor": 8.0}
_SMALL_4 = {"hidden_size_per_layer_input": 256, "global_head_dim": 512}
_LARGE_4 = GEMMA_4 | {"final_logit_soft_cap": 30.0, "sliding_window_size": 1024}
_LARGE_4 |= {"global_head_dim": 512, "attention_k_eq_v": True}

# Gemma Team 2024 (arXiv:2403.08295 table 1), 2024 (arXiv:2408.00118 table 1),
# 2025 (arXiv:2503.19786); 270M by its published config. Gemma 4: the sizes with which transformers
# converts the published checkpoints (its `convert_gemma4_weights.py`), 12B by its GGUF file.
PRESETS: dict[str, dict[str, Any]] = {
    "gemma_2b_en": _size(256_000, 18, 8, 1, 2048, 32_768, 256),
    "gemma_7b_en": _size(256_000, 28, 16, 16, 3072, 49_152, 256),
    "gemma2_2b_en": _size(256_000, 26, 8, 4, 2304, 18_432, 256) | GEMMA_2,
    "gemma2_9b_en": _size(256_000, 42, 16, 8, 3584, 28_672, 256) | GEMMA_2,
    "gemma2_27b_en": _size(256_000, 46, 32, 16, 4608, 73_728, 128)
    | GEMMA_2
    | {"query_head_dim_normalize": False},
    "gemma3_270m": _size(262_144, 18, 4, 1, 640, 2048, 256)
    | GEMMA_3
    | {"sliding_window_size": 512},
    "gemma3_1b": _size(262_144, 26, 4, 1, 1152, 6912, 256) | GEMMA_3 | {"sliding_window_size": 512},
    "gemma3_4b_text": _size(262_144, 34, 8, 4, 2560, 10_240, 256) | GEMMA_3 | _LONG_CONTEXT,
    "gemma3_12b_text": _size(262_144, 48, 16, 8, 3840, 15_360, 256) | GEMMA_3 | _LONG_CONTEXT,
    "gemma3_27b_text": _size(262_144, 62, 32, 16, 5376, 21_504, 128)
    | GEMMA_3
    | _LONG_CONTEXT
    | {"query_head_dim_normalize": False},
    # EmbeddingGemma Team 2025, arXiv:2509.20354; its published config and modules.
    "embedding_gemma_300m": _size(262_144, 24, 3, 1, 768, 1152, 256)
    | GEMMA_3
    | {"sliding_window_size": 512, "use_bidirectional_attention": True}
    | {"task_dense": _dense(3072, 768)},
    "gemma4_e2b": _size(262_144, 35, 8, 1, 1536, 6144, 256)
    | GEMMA_4
    | _SMALL_4
    | {"final_logit_soft_cap": 30.0, "sliding_window_pattern": 5}
    | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "gemma4_e4b": _size(262_144, 42, 8, 2, 2560, 10_240, 256)
    | GEMMA_4
    | _SMALL_4
    | {"final_logit_soft_cap": 30.0, "num_kv_shared_layers": 18},
    "gemma4_12b": _size(262_144, 48, 16, 8, 3840, 15_360, 256)
    | _LARGE_4
    | {"num_global_key_value_heads": 1},
    "gemma4_31b": _size(262_144, 60, 32, 16, 5376, 21_504, 256)
    | _LARGE_4
    | {"num_global_key_value_heads": 4},
    "gemma4_26b_a4b": _size(262_144, 30, 16, 8, 2816, 2112, 256)
    | _LARGE_4
    | {"num_global_key_value_heads": 2, "enable_moe_block": True}
    | {"num_experts": 128, "num_experts_per_token": 8, "expert_intermediate_dim": 704},
    "gemma_debug": _size(*_DEBUG, 128, 8),
    "gemma2_debug": _size(*_DEBUG, 128, 8)
    | GEMMA_2
    | {"sliding_window_size": 8, "query_head_dim_normalize": False},
    "gemma3_debug": _size(*_DEBUG, 64, 8)
    | GEMMA_3
    | {"sliding_window_size": 8, "sliding_window_pattern": 2},
    "embedding_gemma_debug": _size(*_DEBUG, 64, 8)
    | GEMMA_3
    | {"sliding_window_size": 8, "sliding_window_pattern": 2}
    | {"use_bidirectional_attention": True, "task_dense": _dense(48, 32)},
    "gemma4_debug": _size(320, 4, 4, 2, 32, 64, 8)
    | GEMMA_4
    | {"sliding_window_size": 8, "sliding_window_pattern": 2, "final_logit_soft_cap": 30.0}
    | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
    "gemma4_moe_debug": _size(320, 2, 4, 2, 32, 32, 8)
    | GEMMA_4
    | {"sliding_window_size": 8, "sliding_window_pattern": 2, "enable_moe_block": True}
    | {"num_experts": 6, "num_experts_per_token": 2, "expert_intermediate_dim": 24},
}
