"""Hugging Face directories of CLIP: their text tower, alone, projected, or beside the images'."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.common.encoder import rules as encoder_rules
from kmodels.models.common.encoder.config import GELUS
from kmodels.models.common.encoder.rules import BLOCK, HIDDEN_ACTS, LAYERS
from kmodels.models.common.huggingface import tokenizer_of
from kmodels.weights import Rule, SourceCheckpoint, read_safetensors

PREFIX, PROJECTION = "text_model.", "text_projection"
PROJECTED = "CLIPTextModelWithProjection"
# What belongs to the images, and places that older files keep beside what stands there.
OTHERS = ("vision_model.", "visual_projection.", "logit_scale")
OLD = "embeddings.position_ids"
TABLE = "embeddings.token_embedding"
# The end token by which transformers knows configs that were written with a wrong one.
WRONG_END = 2
# What transformers' configs leave out where it equals their own defaults.
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048},
    **{"num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0},
    **{"eos_token_id": 49_407, "projection_dim": 512},
}
FIELDS = {
    **{"vocabulary_size": "vocab_size", "embedding_dim": "hidden_size"},
    **{"hidden_dim": "hidden_size", "num_layers": "num_hidden_layers"},
    **{"num_heads": "num_attention_heads", "intermediate_dim": "intermediate_size"},
    **{"max_sequence_length": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps"},
    "attention_dropout": "attention_dropout",
}


def rules(prefix: str = "") -> list[Rule]:
    """Returns the table; `prefix` is empty in a bare model."""
    table = [
        Rule(f"{TABLE}.weight", "token_embedding/embeddings"),
        Rule("embeddings.position_embedding.weight", "position_embedding/embeddings"),
        *encoder_rules.blocks(),
        *encoder_rules.norms({"final_layer_norm": "final_norm"}),
    ]
    projection = encoder_rules.dense({PROJECTION: PROJECTION})[:1]
    return [*encoder_rules.prefixed(prefix, table), *projection]


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Returns whether a directory with this config.json is of this format."""
    return path.is_dir() and description.get("model_type") in ("clip", "clip_text_model")


def open_checkpoint(
    path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
) -> SourceCheckpoint:
    """Understands a directory.

    Args:
        path: of the directory.
        description: the object in its config.json.
        given: unused; the file says it all.
        weights: False where only the architecture is wanted and no tensors need be there.

    Raises:
        InputError: for settings that the model has no counterpart for.
    """
    text, projection = _text(description)
    if not isinstance(end := text["eos_token_id"], int):
        raise InputError(f"{path}: eos_token_id is {end!r}; the model knows one number")
    tensors = read_safetensors(path) if weights else {}
    prefix = PREFIX if any(name.startswith(PREFIX) for name in tensors) else ""
    if weights:
        held = tensors.get(f"{PROJECTION}.weight")
        projection = None if held is None else held.shape[0]
    scale = description.get("logit_scale_init_value")
    if "logit_scale" in tensors:
        scale = float(tensors["logit_scale"].read())
    gelu = encoder_rules.approximate_gelu(path, text["hidden_act"])
    left = (*OTHERS, prefix + OLD)
    return SourceCheckpoint(
        path=path,
        kind="Hugging Face",
        backbone={ours: text[theirs] for ours, theirs in FIELDS.items()}
        | {"intermediate_activation": next(name for name, x in GELUS.items() if x == gelu)}
        | {"end_token_id": None if end == WRONG_END else end},
        task={"projection_dim": projection, "logit_scale": scale},
        preprocessor=tokenizer_of(path),
        tensors={name: x for name, x in tensors.items() if not name.startswith(left)},
        rules=rules(prefix),
    )


def _text(description: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Returns what a config.json says of the text tower, and the width of its projection."""
    if description["model_type"] == "clip":
        held = description.get("text_config_dict") or description.get("text_config") or {}
        return DEFAULTS | held, description.get("projection_dim", DEFAULTS["projection_dim"])
    text = DEFAULTS | description
    projects = PROJECTED in (description.get("architectures") or ())
    return text, text["projection_dim"] if projects else None


def transformers_form(
    model: keras.Model,
) -> tuple[dict[str, Any], dict[str, Any], list[Rule], dict]:
    """Returns config.json, nothing for pictures, the table, and no tensors of zeros.

    Args:
        model: a backbone or embedder.

    Raises:
        InputError: for an end token that transformers takes for another rule.
    """
    config = getattr(model, "backbone", model).config
    if config.end_token_id == WRONG_END:
        raise InputError(
            f"transformers pools at the highest id where end_token_id is {WRONG_END}; give None"
        )
    projection = getattr(model, "settings", {}).get("projection_dim")
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    roles = {"bos_token_id": "start_token_id", "pad_token_id": "pad_token_id"}
    form: dict[str, Any] = {
        "architectures": [PROJECTED if projection else "CLIPTextModel"],
        "model_type": "clip_text_model",
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "hidden_act": HIDDEN_ACTS[GELUS[config.intermediate_activation]],
        "eos_token_id": WRONG_END if config.end_token_id is None else config.end_token_id,
        **{name: getattr(tokenizer, role) for name, role in roles.items() if tokenizer},
        **({"projection_dim": projection} if projection else {}),
    }
    return form, {}, rules(PREFIX if projection else ""), {}


def peft_names(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    names = {f"block_{{i}}/{x}": f"{BLOCK}.{theirs}" for x, theirs in LAYERS.items()}
    names["token_embedding"] = TABLE
    projects = getattr(model, "settings", {}).get("projection_dim")
    head = {PROJECTION: PROJECTION} if projects else {}
    prefixes = (PREFIX, "") if projects else ("", PREFIX)
    return [{ours: start + x for ours, x in names.items()} | head for start in prefixes]
