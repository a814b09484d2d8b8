"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any

from kmodels.models.gemma.presets import PRESETS as TEXT

_SEES = {"use_vision_bidirectional_attention": True}


def _tower(width: int, layers: int, heads: int, mlp: int, head: int, large: bool) -> dict[str, Any]:
    return {
        "vision_encoder": {
            **{"patch_size": 16, "num_heads": heads, "hidden_dim": width, "num_layers": layers},
            **{"intermediate_dim": mlp, "head_dim": head, "position_embedding_size": 10_240},
            **{"use_clipped_linears": not large, "standardize": large},
        }
    }


# The sizes with which transformers converts the published checkpoints (its
# `convert_gemma4_weights.py`), and the defaults of its `Gemma4UnifiedVisionConfig`.
_SMALL = _tower(768, 16, 12, 3072, 64, large=False)
_LARGE = _tower(1152, 27, 16, 4304, 72, large=True) | _SEES
_DEBUG = TEXT["gemma4_debug"] | {"image_token_id": 310}
PRESETS: dict[str, dict[str, Any]] = {
    "gemma4_e2b": TEXT["gemma4_e2b"] | _SMALL,
    "gemma4_e4b": TEXT["gemma4_e4b"] | _SMALL,
    "gemma4_12b": TEXT["gemma4_12b"] | _SEES | {"vision_encoder": {"hidden_dim": 3840}},
    "gemma4_26b_a4b": TEXT["gemma4_26b_a4b"] | _LARGE,
    "gemma4_31b": TEXT["gemma4_31b"] | _LARGE,
    "gemma4_vision_debug": _DEBUG
    | {
        "vision_encoder": {
            **{"patch_size": 2, "num_heads": 2, "hidden_dim": 24, "num_layers": 2, "head_dim": 8},
            **{"intermediate_dim": 40, "pool_size": 2, "position_embedding_size": 140},
        }
    },
    "gemma4_unified_debug": _DEBUG
    | _SEES
    | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
    | {
        "vision_encoder": {
            **{"hidden_dim": 24, "patch_size": 2, "pool_size": 2, "position_embedding_size": 70}
        }
    },
}
