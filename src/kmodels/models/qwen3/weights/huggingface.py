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
    **{"hidden_act": "silu", "tie_word_embeddings": False},
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
    windows = text.get("use_sliding_window") and text["sliding_window"]
    wrong = {
        f"an activation {text['hidden_act']!r}": text["hidden_act"] != "silu",
        "windows in some layers alone": windows
        and set(text.get("layer_types") or ()) != {"sliding_attention"},
    }
    decoder.refuse(path, wrong)
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    base, factor = decoder.rope(path, scaling, text.get("rope_theta"), 10_000.0)
    return decoder.fields(text) | {
        "rope_max_wavelength": base,
        "rope_scaling_factor": factor,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "sliding_window_size": windows or None,
        "attention_bias": bool(text.get("attention_bias")),
    }


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns config.json, nothing for images, the table, and no tensors of zeros.

    Args:
        model: a backbone or causal model; a backbone with an output table is written as the latter.
    """
    config = getattr(model, "backbone", model).config
    window = config.sliding_window_size
    form = {
        "hidden_act": "silu",
        **decoder.rope_form(config.rope_max_wavelength, config.rope_scaling_factor),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": decoder.layer_types(config),
    }
    names = ("qwen3", "Qwen3ForCausalLM", "Qwen3Model")
    return decoder.transformers_form(model, names, form, rules)


FORMAT = decoder.HuggingFaceFormat(("qwen3",), Qwen3Config, fields, rules)
