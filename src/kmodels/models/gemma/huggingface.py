"""Hugging Face directories of Gemma 1 to 4, including the text part of multimodal models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.blocks import huggingface as decoder
from kmodels.models.blocks import module_names
from kmodels.models.blocks.config import GLOBAL, LOCAL
from kmodels.models.blocks.embedder.sentence_transformers import EmbedderFormat
from kmodels.models.blocks.rope import Rope
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.presets import GEMMA_2, GEMMA_3, GEMMA_4
from kmodels.weights import Rule

# === Reading ===

GENERATIONS = {"gemma": 1, "gemma2": 2, "gemma3_text": 3, "gemma3": 3} | dict.fromkeys(
    ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"), 4
)
# Prefixes of the text part of multimodal models in transformers 5 and 4, of a causal model, and of
# a model without its output layer.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
OTHER_PARTS = (
    *("vision_tower", "multi_modal_projector", "embed_vision"),
    *("vision_embedder", "audio_tower", "embed_audio"),
)
# transformers' configs omit settings that equal these defaults.
_FROM_2 = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 256},
}
DEFAULTS: dict[int, dict[str, Any]] = {
    1: {
        **{"hidden_size": 3072, "intermediate_size": 24_576, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "head_dim": 256, "num_hidden_layers": 28},
        **{"max_position_embeddings": 8192, "vocab_size": 256_000},
    },
    2: {
        **_FROM_2,
        **{"max_position_embeddings": 8192, "vocab_size": 256_000, "num_hidden_layers": 26},
        **{"query_pre_attn_scalar": 256, "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    3: {
        **_FROM_2,
        **{"max_position_embeddings": 131_072, "vocab_size": 262_208, "num_hidden_layers": 26},
        **{"query_pre_attn_scalar": 256, "sliding_window": 4096},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    4: {
        **_FROM_2,
        **{"max_position_embeddings": 131_072, "vocab_size": 262_144, "num_hidden_layers": 30},
        **{"sliding_window": 512, "final_logit_softcapping": None, "attention_k_eq_v": False},
        **{"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144},
    },
}
# Defaults that differ in Gemma 4 12B, the model without a vision encoder.
UNIFIED = {"sliding_window": 1024, "hidden_size_per_layer_input": 0}


def norms(config: GemmaConfig) -> dict[str, str]:
    """Returns the path of each norm in a block, by its name in transformers."""
    names = dict(decoder.NORMS)
    if config.generation > 1:
        names["post_attention_layernorm"] = "post_attention_norm"
        names["pre_feedforward_layernorm"] = "mlp_norm"
        names["post_feedforward_layernorm"] = "post_mlp_norm"
    if config.generation > 2:
        names |= decoder.HEAD_NORMS
    return names


def rules(config: GemmaConfig, prefix: str = "model.") -> list[Rule]:
    """Returns the rules of a config; `prefix` is empty for a model without its output layer."""
    return decoder.rules(config, norms(config), prefix)


def backbone_fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `GemmaConfig` for a config.json."""
    generation = GENERATIONS[description["model_type"]]
    described = {**description, **(description.get("text_config") or {})}
    unified = UNIFIED if "unified" in description["model_type"] else {}
    text = {**DEFAULTS[generation], **unified, **described}
    activation = text.get("hidden_activation") or text.get("hidden_act") or "gelu_pytorch_tanh"
    known = ("gelu", "gelu_pytorch_tanh") if generation == 1 else ("gelu_pytorch_tanh",)
    wrong = {
        f"an activation {activation!r}": activation not in known,
        "attention_bias": text.get("attention_bias"),
        "use_bidirectional_attention": (text.get("use_bidirectional_attention") and generation < 3),
    }
    decoder.refuse(path, wrong)
    # As in transformers, the text_config of a multimodal model does not set this.
    tied = {"tie_word_embeddings": bool(description.get("tie_word_embeddings", True))}
    if generation == 4:
        return _gemma_4_fields(path, text) | tied
    fields = decoder.fields(text) | tied
    fields["intermediate_dim"] *= 1 if generation == 3 else 2
    if generation < 3:
        rope = _rope(path, text, "", "rope_theta", 10_000.0)
        fields |= {**rope_fields("local", rope), **rope_fields("global", rope)}
    if generation == 1:
        return fields
    fields |= GEMMA_2 if generation == 2 else GEMMA_3
    pattern = _pattern(text, fields["sliding_window_pattern"])
    fields |= {
        "query_pre_attention_scalar": float(text["query_pre_attn_scalar"]),
        "final_logit_soft_cap": text["final_logit_softcapping"],
        # transformers' Gemma 3 reads this setting but does not use it.
        "attention_logit_soft_cap": text["attn_logit_softcapping"] if generation == 2 else None,
        "sliding_window_size": decoder.window(path, text["sliding_window"], pattern),
        "use_bidirectional_attention": bool(text.get("use_bidirectional_attention")),
        **pattern,
    }
    if generation == 2:
        return fields
    local = _rope(path, text, LOCAL, "rope_local_base_freq", 10_000.0)
    everywhere = _rope(path, text, GLOBAL, "rope_theta", 1_000_000.0)
    return {**fields, **rope_fields("local", local), **rope_fields("global", everywhere)}


def _rope(path: Path, text: dict[str, Any], kind: str, name: str, default: float) -> Rope:
    """Returns the rotary embedding of a kind of layers, or of all, from transformers 4 or 5."""
    new, old = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    # As in transformers, the older name takes precedence.
    if not kind:
        length = text["max_position_embeddings"]
        return decoder.rope(path, old or new, text.get(name), default, length)
    scaling = {**(new.get(kind) or {}), **(old if kind == GLOBAL else {})}
    return rope_of_kind(path, kind, scaling, text.get(name), default)


def _pattern(text: dict[str, Any], usual: int) -> dict[str, Any]:
    """Returns the fields of the local layers: as a period if there is one, else by layer."""
    layers = text["num_hidden_layers"]
    types = text.get("layer_types")
    if not types:
        pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or usual
        return {"sliding_window_pattern": pattern}
    local = [kind == "sliding_attention" for kind in types]
    if not any(local):
        return {"use_sliding_window_attention": False}
    # If all layers are local, there are fewer than a period: keep the family's.
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

# === Gemma 4, read and written ===

# Fields of `GemmaConfig` with the same name in a config.json.
SAME = (
    *("attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp"),
    "hidden_size_per_layer_input",
)
# Fields of experts, with their names in a config.json.
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_token": "top_k_experts",
    "expert_intermediate_dim": "moe_intermediate_size",
}
ROPES_OF_4 = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}


def _gemma_4_fields(path: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a Gemma 4 for the settings of a config.json with defaults."""
    kinds = text.get("layer_types") or [
        LOCAL if (i + 1) % GEMMA_4["sliding_window_pattern"] else GLOBAL
        for i in range(text["num_hidden_layers"])
    ]
    kinds = [*kinds[:-1], GLOBAL]  # transformers makes the last layer global
    heads = decoder.heads_by_kind(path, text, kinds)
    everywhere = heads[GLOBAL]
    head_dim, groups = heads.get(LOCAL, everywhere)
    ropes = text.get("rope_parameters") or {}
    local, full = (
        _rope_of_4(path, kind, ropes.get(kind) or ROPES_OF_4[kind]) for kind in ROPES_OF_4
    )
    wrong = {
        "use_bidirectional_attention='all'": text.get("use_bidirectional_attention") == "all",
        "rope_scaling": text.get("rope_scaling"),
        "a partial_rotary_factor of sliding_attention": local[1] != 1.0,
    }
    decoder.refuse(path, wrong)
    per_layer = text["vocab_size_per_layer_input"] if text["hidden_size_per_layer_input"] else None
    experts = {}
    if text.get("enable_moe_block"):
        sizes = {ours: text.get(theirs) for ours, theirs in EXPERTS.items()}
        experts = {"enable_moe_block": True, **sizes}
    return {
        **decoder.fields({**text, "head_dim": head_dim, "num_key_value_heads": groups}),
        **GEMMA_4,
        **{name: text[name] for name in SAME},
        **experts,
        "layer_types": kinds,
        "global_head_dim": None if everywhere[0] == head_dim else everywhere[0],
        "num_global_key_value_heads": None if everywhere[1] == groups else everywhere[1],
        "sliding_window_size": decoder.window(
            path, text["sliding_window"], {"use_sliding_window_attention": LOCAL in kinds}
        ),
        "final_logit_soft_cap": text["final_logit_softcapping"],
        "vocab_size_per_layer_input": per_layer,
        **rope_fields("local", local[0]),
        **rope_fields("global", full[0]),
        "global_rope_partial_rotary_factor": full[1],
    }


def rope_fields(where: str, rope: Rope) -> dict[str, Any]:
    """Returns the rotary fields of the "local" or the "global" layers."""
    names = ("wavelength", "scaling_factor", "yarn")
    return {f"{where}_rope_{name}": value for name, value in zip(names, rope[:3], strict=True)}


def rope_of_kind(
    path: Path, kind: str, scaling: Mapping[str, Any], theta: float | None, default: float
) -> Rope:
    """Same as `decoder.rope`, for the layers of one kind.

    For kinds of layers transformers reads the length of YaRN in its own settings only, and ignores
    `truncate`.
    """
    if decoder.rope_kind(scaling) == "yarn" and scaling.get("truncate") is False:
        raise InputError(
            f"{path}: rope_parameters of {kind} has truncate=false, which transformers does not "
            "follow by kinds of layers; leave it out"
        )
    return decoder.rope(path, scaling, theta, default)


def _rope_of_4(path: Path, kind: str, settings: Mapping[str, Any]) -> tuple[Rope, float]:
    """Returns the rotary embedding of a kind of layers, and the share of channels that it uses."""
    if settings.get("rope_type") != "proportional":
        return rope_of_kind(path, kind, settings, None, 10_000.0), 1.0
    usual = {"rope_theta": 10_000.0, "factor": 1.0, "partial_rotary_factor": 1.0}
    numbers = usual | decoder.stated(settings)
    base, scaling, turned = (float(numbers[name]) for name in usual)
    return Rope(base, scaling, None), turned


def rope_parameters(config: GemmaConfig) -> dict[str, Any]:
    """Returns the rotary embeddings by kind of layer, in the form of transformers 5."""
    parameters = {}
    for kind, where in ((LOCAL, "local"), (GLOBAL, "global")):
        names = ("wavelength", "scaling_factor", "yarn")
        base, factor, yarn = (getattr(config, f"{where}_rope_{name}") for name in names)
        form = decoder.rope_form(base, factor, yarn)
        scaling = form.get("rope_scaling") or {"rope_type": "default"}
        parameters[kind] = {**scaling, "rope_theta": form["rope_theta"]}
    return parameters


def _gemma_4_form(config: GemmaConfig) -> dict[str, Any]:
    kinds, width = list(config.kinds), config.global_head_dim or config.head_dim
    groups = config.num_global_key_value_heads or config.num_key_value_heads
    differs = {"head_dim": width, "num_key_value_heads": groups}
    differs = {name: value for name, value in differs.items() if value != getattr(config, name)}
    experts = EXPERTS if config.enable_moe_block else {}
    ropes = rope_parameters(config)
    if config.global_rope_yarn is None:
        turned = config.global_rope_partial_rotary_factor
        ropes[GLOBAL] |= {"rope_type": "proportional", "partial_rotary_factor": turned}
    return {
        **{name: getattr(config, name) for name in SAME},
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": config.sliding_window_size,
        "final_logit_softcapping": config.final_logit_soft_cap,
        "vocab_size_per_layer_input": config.per_layer_vocabulary,
        "rope_parameters": ropes,
        "per_layer_config": {
            str(i): differs for i, kind in enumerate(kinds) if differs and kind == GLOBAL
        },
        "global_head_dim": width,
        "enable_moe_block": config.enable_moe_block,
        **{theirs: getattr(config, ours) for ours, theirs in experts.items()},
        **({"num_global_key_value_heads": groups} if config.attention_k_eq_v else {}),
    }


def otherwise_than_4(config: GemmaConfig) -> dict[str, object]:
    """Returns the properties that every Gemma 4 has, with True if this config lacks them."""
    always = [name for name in GEMMA_4 if name.startswith("use_") and "window" not in name]
    problems = {f"{name}=False": not getattr(config, name) for name in always}
    return {**problems, "this query scale": config.query_scale != 1.0}


def lacks_of_yarn(config: GemmaConfig) -> dict[str, object]:
    """Returns YaRN settings that transformers ignores, with True if they are used."""
    settings = {where: getattr(config, f"{where}_rope_yarn") for where in ("local", "global")}
    return {
        f"truncate=False in {where}_rope_yarn": yarn is not None and not yarn.get("truncate", True)
        for where, yarn in settings.items()
    }


# === Writing ===

NAMES = {
    1: ("gemma", "GemmaForCausalLM", "GemmaModel"),
    2: ("gemma2", "Gemma2ForCausalLM", "Gemma2Model"),
    3: ("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextModel"),
    4: ("gemma4_text", "Gemma4ForCausalLM", "Gemma4TextModel"),
}


def _no_counterpart(config: GemmaConfig) -> list[str]:
    generation = config.generation
    if generation == 4:
        local = LOCAL in config.kinds
        absent = {
            **otherwise_than_4(config),
            **lacks_of_yarn(config),
            "attention_logit_soft_cap": config.attention_logit_soft_cap,
            "use_bidirectional_attention": config.use_bidirectional_attention,
            "a last layer with sliding_attention": config.kinds[-1] == LOCAL,
            "use_sliding_window_attention=False": local and not config.use_sliding_window_attention,
        }
        return [name for name, there in absent.items() if there]
    ropes = rope_parameters(config)
    one_rope = ropes[LOCAL] == ropes[GLOBAL]
    absent = {
        "soft caps": generation == 1
        and (config.attention_logit_soft_cap or config.final_logit_soft_cap),
        "a sliding window": generation == 1 and config.use_sliding_window_attention,
        "this query scale": generation == 1 and config.query_scale != config.head_dim**-0.5,
        "attention_logit_soft_cap": generation == 3 and config.attention_logit_soft_cap,
        "use_bidirectional_attention": generation < 3 and config.use_bidirectional_attention,
        "two rotary bases": generation < 3 and not one_rope,
        **(lacks_of_yarn(config) if generation == 3 else {}),
        "one post-norm without the other": generation > 1
        and not (config.use_post_ffw_norm and config.use_post_attention_norm),
    }
    return [*(name for name, there in absent.items() if there), *config.of_gemma_4]


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns (config.json, {}, rules, {}): there is no image processor and no zero tensor."""
    config = getattr(model, "backbone", model).config
    names = NAMES[config.generation]
    if problems := _no_counterpart(config):
        raise InputError(f"transformers' {names[1]} has no counterpart for {', '.join(problems)}")
    if config.generation == 4:
        return decoder.transformers_form(model, names, _gemma_4_form(config), rules)
    form: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        **decoder.rope_form(
            config.global_rope_wavelength,
            config.global_rope_scaling_factor,
            config.global_rope_yarn,
        ),
    }
    if config.generation > 1:
        form |= {
            "query_pre_attn_scalar": _whole(config.query_scale**-2),
            "attn_logit_softcapping": config.attention_logit_soft_cap,
            "final_logit_softcapping": config.final_logit_soft_cap,
            "sliding_window": config.sliding_window_size,
            "sliding_window_pattern": config.sliding_window_pattern,
            "layer_types": decoder.layer_types(config),
        }
    if config.generation == 3:
        form["rope_local_base_freq"] = config.local_rope_wavelength
        # The older names have only the base of local layers.
        if (ropes := rope_parameters(config))[LOCAL]["rope_type"] != "default":
            form["rope_parameters"] = ropes
        form["use_bidirectional_attention"] = config.use_bidirectional_attention
    return decoder.transformers_form(model, names, form, rules)


def _whole(value: float) -> int | float:
    """Returns an int for a float that is whole up to rounding, as transformers expects."""
    return round(value) if abs(value - round(value)) < 1e-6 else value


# === PEFT ===

# Prefixes of text models with and without their output layer, then of the text part of multimodal
# Gemma 3 in transformers 5, 4, and without the output layer.
PEFT_PREFIXES = (
    *module_names.PREFIXES,
    "model.language_model.",
    "language_model.model.",
    "language_model.",
)
PEFT_HEADS = ("lm_head", "language_model.lm_head")


def peft_names(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    norms_of_block = norms(getattr(model, "backbone", model).config)
    table = {ours: theirs for theirs, ours in norms_of_block.items()}
    return module_names.names(model, PEFT_PREFIXES, PEFT_HEADS, table)
