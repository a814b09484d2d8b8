"""Hugging Face directories of dense Qwen 3 models."""

from pathlib import Path
from typing import Any

import keras

from kmodels.models.common import huggingface as decoder
from kmodels.models.qwen3.config import Qwen3Config
from kmodels.weights import Rule

# Settings that transformers' configs leave out where they equal their own defaults.
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "head_dim": 128},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 32_768},
    **{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
}


def rules(config: Qwen3Config, prefix: str = "model.") -> list[Rule]:
    """Returns the table; `prefix` is empty in a bare model."""
    return decoder.rules(config, decoder.NORMS | decoder.HEAD_NORMS, prefix)


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a config.json.

    Raises:
        InputError: lists the settings that the model has no counterpart for.
    """
    text = {**DEFAULTS, **description}
    window, local = _window(text)
    wrong = {
        f"an activation {text['hidden_act']!r}": text["hidden_act"] != "silu",
        "windows in some layers alone": len(local) == 2,
        f"layers with a window and sliding_window={text['sliding_window']!r}, "
        f"use_sliding_window={text['use_sliding_window']!r}": True in local and not window,
    }
    decoder.refuse(path, wrong)
    # As in transformers, the older name counts before the newer one.
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    length = text["max_position_embeddings"]
    rope = decoder.rope(path, scaling, text.get("rope_theta"), 10_000.0, length)
    return decoder.fields(text) | {
        "rope_max_wavelength": rope.base,
        "rope_scaling_factor": rope.scaling,
        "tie_word_embeddings": bool(text["tie_word_embeddings"]),
        "rope_yarn": rope.yarn,
        "sliding_window_size": window if True in local else None,
        "attention_bias": bool(text.get("attention_bias")),
    }


def _window(text: dict[str, Any]) -> tuple[int | None, set[bool]]:
    """Returns the window, None if there is none, and whether layers have it: all, some or none."""
    window = text["sliding_window"] if text["use_sliding_window"] else None
    if (types := text.get("layer_types")) is not None:
        return window, {kind == "sliding_attention" for kind in types}
    first = text["max_window_layers"]
    layers = range(text["num_hidden_layers"])
    return window, {window is not None and i >= first for i in layers}


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns config.json, nothing for images, the table, and no tensors of zeros.

    Args:
        model: a backbone or causal model; a backbone with an output table is written as the latter.
    """
    config = getattr(model, "backbone", model).config
    window = config.sliding_window_size
    form = {
        "hidden_act": "silu",
        **decoder.rope_form(
            config.rope_max_wavelength, config.rope_scaling_factor, config.rope_yarn
        ),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": decoder.layer_types(config),
    }
    names = ("qwen3", "Qwen3ForCausalLM", "Qwen3Model")
    return decoder.transformers_form(model, names, form, rules)


FORMAT = decoder.HuggingFaceFormat(("qwen3",), Qwen3Config, fields, rules)
