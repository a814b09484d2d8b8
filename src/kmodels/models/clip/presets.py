"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any


def _size(layers: int, heads: int, activation: str = "gelu", head_dim: int = 64) -> dict[str, Any]:
    width = heads * head_dim
    return {
        **{"vocabulary_size": 49_408, "embedding_dim": width, "hidden_dim": width},
        **{"num_layers": layers, "num_heads": heads, "intermediate_dim": 4 * width},
        **{"intermediate_activation": activation, "task_projection_dim": width},
    }


PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2021, arXiv:2103.00020 table 20: the towers beside ViT-B and ViT-L.
    "clip_text_base": _size(12, 8, "quick_gelu"),
    "clip_text_large": _size(12, 12, "quick_gelu"),
    # OpenCLIP's (Cherti et al. 2023, arXiv:2212.07143), beside ViT-H and ViT-bigG.
    "clip_text_huge": _size(24, 16),
    "clip_text_bigg": _size(32, 20),
    # Below 100,000 parameters.
    "clip_text_debug": _size(2, 2, "quick_gelu", 16) | {"vocabulary_size": 320},
}
