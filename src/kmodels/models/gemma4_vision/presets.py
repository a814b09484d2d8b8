"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any

from kmodels.models.gemma.presets import PRESETS as TEXT

_SEES = {"use_vision_bidirectional_attention": True}
# The vision halves as transformers converts the published checkpoints.
PRESETS: dict[str, dict[str, Any]] = {
    "gemma4_12b": TEXT["gemma4_12b"] | _SEES | {"vision_encoder": {"hidden_dim": 3840}},
    "gemma4_unified_debug": TEXT["gemma4_debug"]
    | _SEES
    | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
    | {"image_token_id": 310}
    | {
        "vision_encoder": {
            **{"hidden_dim": 24, "patch_size": 2, "pool_size": 2},
            "position_embedding_size": 70,
        }
    },
}
