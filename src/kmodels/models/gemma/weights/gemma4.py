"""Reads the text part of a config.json of Gemma 4, in both spellings, and writes it again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmodels.models.common import huggingface as decoder
from kmodels.models.common.layer_kinds import GLOBAL, LOCAL
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.presets import GEMMA_4

# Fields of `GemmaConfig` whose names are the same in a config.json.
SAME = (
    *("attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp"),
    "hidden_size_per_layer_input",
)
# Those of experts, with the names there.
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_token": "top_k_experts",
    "expert_intermediate_dim": "moe_intermediate_size",
}
ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}


def fields(path: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a config.json, whose defaults are filled in.

    Raises:
        InputError: for settings that the model has no counterpart for.
    """
    kinds = text.get("layer_types") or [
        LOCAL if (i + 1) % GEMMA_4["sliding_window_pattern"] else GLOBAL
        for i in range(text["num_hidden_layers"])
    ]
    kinds = [*kinds[:-1], GLOBAL]  # transformers' last layer is global, whatever is said of it
    heads = decoder.heads_by_kind(path, text, kinds)
    everywhere = heads[GLOBAL]
    head_dim, groups = heads.get(LOCAL, everywhere)
    given = text.get("rope_parameters") or {}
    local, full = (decoder.partial_rope(path, given.get(kind) or ROPES[kind]) for kind in ROPES)
    wrong = {
        "use_bidirectional_attention='all'": text.get("use_bidirectional_attention") == "all",
        "rope_scaling": text.get("rope_scaling"),
        "a partial_rotary_factor of sliding_attention": local[2] != 1.0,
    }
    decoder.refuse(path, wrong)
    per_layer = text["vocab_size_per_layer_input"] if text["hidden_size_per_layer_input"] else None
    experts = {}
    if text.get("enable_moe_block"):
        found = {ours: text.get(theirs) for ours, theirs in EXPERTS.items()}
        experts = {"enable_moe_block": True, **found}
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
        "local_rope_wavelength": local[0],
        "local_rope_scaling_factor": local[1],
        "global_rope_wavelength": full[0],
        "global_rope_scaling_factor": full[1],
        "global_rope_partial_rotary_factor": full[2],
    }


def form(config: GemmaConfig) -> dict[str, Any]:
    """Returns what config.json says of a Gemma 4 besides, in both spellings."""
    kinds, width = list(config.kinds), config.global_head_dim or config.head_dim
    groups = config.num_global_key_value_heads or config.num_key_value_heads
    differs = {"head_dim": width, "num_key_value_heads": groups}
    differs = {name: value for name, value in differs.items() if value != getattr(config, name)}
    experts = EXPERTS if config.enable_moe_block else {}
    local = decoder.rope_form(config.local_rope_wavelength, config.local_rope_scaling_factor)
    full = {
        "rope_type": "proportional",
        "rope_theta": config.global_rope_wavelength,
        **({"factor": scaling} if (scaling := config.global_rope_scaling_factor) != 1.0 else {}),
        "partial_rotary_factor": config.global_rope_partial_rotary_factor,
    }
    return {
        **{name: getattr(config, name) for name in SAME},
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": config.sliding_window_size,
        "final_logit_softcapping": config.final_logit_soft_cap,
        "vocab_size_per_layer_input": config.per_layer_vocabulary,
        "rope_parameters": {
            LOCAL: {**ROPES[LOCAL], **local.pop("rope_scaling", {}), **local},
            GLOBAL: full,
        },
        "per_layer_config": {
            str(i): differs for i, kind in enumerate(kinds) if differs and kind == GLOBAL
        },
        "global_head_dim": width,
        "enable_moe_block": config.enable_moe_block,
        **{theirs: getattr(config, ours) for ours, theirs in experts.items()},
        **({"num_global_key_value_heads": groups} if config.attention_k_eq_v else {}),
    }


def otherwise(config: GemmaConfig) -> dict[str, object]:
    """Returns what each Gemma 4 has and this config leaves out, as `lacks` does."""
    always = [name for name in GEMMA_4 if name.startswith("use_") and "window" not in name]
    found = {f"{name}=False": not getattr(config, name) for name in always}
    return {**found, "this query scale": config.query_scale != 1.0}


def lacks(config: GemmaConfig) -> dict[str, object]:
    """Returns what transformers' Gemma 4 has no counterpart for: names to whether it is there."""
    return {
        **otherwise(config),
        "attention_logit_soft_cap": config.attention_logit_soft_cap,
        "use_bidirectional_attention": config.use_bidirectional_attention,
        "a last layer with sliding_attention": config.kinds[-1] == LOCAL,
        "use_sliding_window_attention=False": (
            LOCAL in config.kinds and not config.use_sliding_window_attention
        ),
    }
