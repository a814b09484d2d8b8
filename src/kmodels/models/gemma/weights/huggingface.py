"""Hugging Face directories of Gemma 1 to 4, the text part of multimodal ones included."""

from pathlib import Path
from typing import Any

from kmodels.models.common import huggingface as decoder
from kmodels.models.common.embedder.sentence_transformers import EmbedderFormat
from kmodels.models.common.layer_kinds import GLOBAL, LOCAL
from kmodels.models.common.yarn import Rope
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.presets import GEMMA_2, GEMMA_3
from kmodels.models.gemma.weights import gemma4
from kmodels.weights import Rule

GENERATIONS = {"gemma": 1, "gemma2": 2, "gemma3_text": 3, "gemma3": 3} | dict.fromkeys(
    ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"), 4
)
# A causal model, the text part of a multimodal one in transformers 4 and 5, a bare model.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
OTHER_PARTS = (
    *("vision_tower", "multi_modal_projector", "embed_vision"),
    *("vision_embedder", "audio_tower", "embed_audio"),
)
# Settings that transformers' configs leave out where they equal their own defaults.
DEFAULTS: dict[int, dict[str, Any]] = {
    1: {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    2: {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    3: {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    4: {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
}
# transformers' default of `max_position_embeddings` in Gemma 1 and 2.
LENGTH = 8192
# Those of the model without towers, Gemma 4 12B, which differ.
UNIFIED = {"sliding_window": 1024, "hidden_size_per_layer_input": 0}


def norms(config: GemmaConfig) -> dict[str, str]:
    """Returns the path in a block of each norm, by its name in transformers."""
    found = dict(decoder.NORMS)
    if config.generation > 1:
        found["post_attention_layernorm"] = "post_attention_norm"
        found["pre_feedforward_layernorm"] = "mlp_norm"
        found["post_feedforward_layernorm"] = "post_mlp_norm"
    if config.generation > 2:
        found |= decoder.HEAD_NORMS
    return found


def rules(config: GemmaConfig, prefix: str = "model.") -> list[Rule]:
    """Returns the table of one generation; `prefix` is empty in a bare model."""
    return decoder.rules(config, norms(config), prefix)


def backbone_fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a config.json.

    Raises:
        InputError: lists the settings that the model has no counterpart for.
    """
    generation = GENERATIONS[description["model_type"]]
    given = {**description, **(description.get("text_config") or {})}
    unified = UNIFIED if "unified" in description["model_type"] else {}
    text = {**DEFAULTS[generation], **unified, **given}
    activation = text.get("hidden_activation") or text.get("hidden_act") or "gelu_pytorch_tanh"
    known = ("gelu", "gelu_pytorch_tanh") if generation == 1 else ("gelu_pytorch_tanh",)
    wrong = {
        f"an activation {activation!r}": activation not in known,
        "attention_bias": text.get("attention_bias"),
        "use_bidirectional_attention": (text.get("use_bidirectional_attention") and generation < 3),
    }
    decoder.refuse(path, wrong)
    # Of a multimodal model, as in transformers, the text_config does not decide.
    tied = {"tie_word_embeddings": bool(description.get("tie_word_embeddings", True))}
    if generation == 4:
        return gemma4.fields(path, text) | tied
    fields = decoder.fields(text) | tied
    fields["intermediate_dim"] *= 1 if generation == 3 else 2
    rope = _rope(path, text)
    if generation == 1:
        return fields | rope_everywhere(rope("", "rope_theta", 10_000.0))
    fields |= GEMMA_2 if generation == 2 else GEMMA_3
    pattern = _pattern(text, fields["sliding_window_pattern"])
    fields |= {
        "query_pre_attention_scalar": float(text["query_pre_attn_scalar"]),
        "final_logit_soft_cap": text["final_logit_softcapping"],
        # Transformers' Gemma 3 reads this setting and does not apply it.
        "attention_logit_soft_cap": text["attn_logit_softcapping"] if generation == 2 else None,
        "sliding_window_size": decoder.window(path, text["sliding_window"], pattern),
        "use_bidirectional_attention": bool(text.get("use_bidirectional_attention")),
        **pattern,
    }
    if generation == 2:
        return fields | rope_everywhere(rope("", "rope_theta", 10_000.0))
    return fields | {
        **gemma4.rope_fields("local", rope(LOCAL, "rope_local_base_freq", 10_000.0)),
        **gemma4.rope_fields("global", rope(GLOBAL, "rope_theta", 1_000_000.0)),
    }


def rope_everywhere(rope: Rope) -> dict[str, Any]:
    """Returns the fields of a model whose layers have one rotary embedding."""
    return {**gemma4.rope_fields("local", rope), **gemma4.rope_fields("global", rope)}


def _rope(path: Path, text: dict[str, Any]) -> Any:
    """Reads wavelength and scaling as transformers 4 and 5 write them."""
    new, old = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}

    def read(kind: str, name: str, default: float) -> Rope:
        # As in transformers, the older name counts before the newer one.
        if not kind:
            length = text.get("max_position_embeddings", LENGTH)
            return decoder.rope(path, old or new, text.get(name), default, length)
        scaling = {**(new.get(kind) or {}), **(old if kind == GLOBAL else {})}
        return gemma4.rope_of_kind(path, kind, scaling, text.get(name), default)

    return read


def _pattern(text: dict[str, Any], usual: int) -> dict[str, Any]:
    """Returns which layers are local: as "every n-th is not" where that says it, else by layer."""
    layers = text["num_hidden_layers"]
    types = text.get("layer_types")
    if not types:
        pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or usual
        return {"sliding_window_pattern": pattern}
    local = [kind == "sliding_attention" for kind in types]
    if not any(local):
        return {"use_sliding_window_attention": False}
    # Fewer layers than the usual pattern are all local; keep the pattern of the family then.
    pattern = local.index(False) + 1 if False in local else max(usual, layers + 1)
    if local != [bool((i + 1) % pattern) for i in range(layers)]:
        return {"layer_types": types}
    return {"sliding_window_pattern": pattern}


FORMAT = EmbedderFormat(
    kinds=GENERATIONS,
    config_class=GemmaConfig,
    fields=backbone_fields,
    table=rules,
    prefixes=PREFIXES,
    other_parts=OTHER_PARTS,
    whole={"gemma3": "Gemma3ImageTextLM"}
    | dict.fromkeys(("gemma4", "gemma4_unified"), "Gemma4ImageTextLM"),
)
