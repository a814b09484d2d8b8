"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any

from kmodels.models.gemma.presets import PRESETS as TEXT

# Gemma Team 2025 (arXiv:2503.19786), section 2.1: SigLIP's So400m tower for 896 pixels, 256 tokens.
TOWER: dict[str, Any] = {
    "image_size": 896,
    "patch_size": 14,
    "num_heads": 16,
    "hidden_dim": 1152,
    "num_layers": 27,
    "intermediate_dim": 4304,
    "pool_size": 4,
}
# The table has 64 rows more than that of the text models, for the token of the images.
SEEING = {"vision_encoder": TOWER, "vocabulary_size": 262_208}
PRESETS: dict[str, dict[str, Any]] = {
    "gemma3_4b": TEXT["gemma3_4b_text"] | SEEING,
    "gemma3_12b": TEXT["gemma3_12b_text"] | SEEING,
    "gemma3_27b": TEXT["gemma3_27b_text"] | SEEING,
    "gemma3_vision_debug": TEXT["gemma3_debug"]
    | {"image_token_id": 320}
    | {
        "vision_encoder": {
            **{"image_size": 16, "patch_size": 4, "pool_size": 2, "num_layers": 2},
            **{"num_heads": 2, "hidden_dim": 24, "intermediate_dim": 40},
        }
    },
}
