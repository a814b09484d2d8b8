"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any


def _size(
    layers: int, heads: int, width: int, intermediate: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "vocabulary_size": 151_936,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_dim": width,
        "intermediate_dim": intermediate,
        "rope_max_wavelength": 1_000_000.0,
        "tie_word_embeddings": tied,
    }


# Qwen Team 2025 (arXiv:2505.09388 table 1), and the config.json of Qwen/Qwen3-0.6B and so on.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3_0.6b": _size(28, 16, 1024, 3072, tied=True),
    "qwen3_1.7b": _size(28, 16, 2048, 6144, tied=True),
    "qwen3_4b": _size(36, 32, 2560, 9728, tied=True),
    "qwen3_8b": _size(36, 32, 4096, 12_288),
    "qwen3_14b": _size(40, 40, 5120, 17_408),
    "qwen3_32b": _size(64, 64, 5120, 25_600),
    # Below 100,000 parameters; fewer key/value heads than heads, and a table for the output.
    "qwen3_debug": _size(2, 4, 32, 64)
    | {"vocabulary_size": 320, "num_key_value_heads": 2, "head_dim": 8},
}
