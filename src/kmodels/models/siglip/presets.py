"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any


def _size(layers: int, heads: int, width: int, mlp: int, **more: Any) -> dict[str, Any]:
    return {
        **{"vocabulary_size": 32_000, "embedding_dim": width, "hidden_dim": width},
        **{"num_layers": layers, "num_heads": heads, "intermediate_dim": mlp},
        **more,
    }


# SigLIP 2 reads Gemma's tokens.
GEMMA: dict[str, Any] = {"vocabulary_size": 256_000}
PRESETS: dict[str, dict[str, Any]] = {
    # Zhai et al. 2023 (arXiv:2303.15343): the towers beside ViT-B and ViT-L, and that of optimised
    # shape (Alabdulmohsin et al. 2023, arXiv:2305.13035); sizes of the published config.json files.
    "siglip_text_base": _size(12, 12, 768, 3072),
    "siglip_text_large": _size(24, 16, 1024, 4096),
    "siglip_text_so400m": _size(27, 16, 1152, 4304),
    # Tschannen et al. 2025, arXiv:2502.14786.
    "siglip2_text_base": _size(12, 12, 768, 3072) | GEMMA,
    "siglip2_text_large": _size(24, 16, 1024, 4096) | GEMMA,
    "siglip2_text_so400m": _size(27, 16, 1152, 4304) | GEMMA,
    "siglip2_text_giant": _size(27, 16, 1152, 4304, projection_dim=1536) | GEMMA,
    # Below 100,000 parameters.
    "siglip_text_debug": _size(2, 2, 32, 64) | {"vocabulary_size": 320},
}
