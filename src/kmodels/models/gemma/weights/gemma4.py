"""Reads the text part of a config.json of Gemma 4, in both spellings, and writes it again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.common import huggingface as decoder
from kmodels.models.common.layer_kinds import GLOBAL, LOCAL
from kmodels.models.common.yarn import Rope
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
    local, full = (_rope(path, kind, given.get(kind) or ROPES[kind]) for kind in ROPES)
    wrong = {
        "use_bidirectional_attention='all'": text.get("use_bidirectional_attention") == "all",
        "rope_scaling": text.get("rope_scaling"),
        "a partial_rotary_factor of sliding_attention": local[1] != 1.0,
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
        **rope_fields("local", local[0]),
        **rope_fields("global", full[0]),
        "global_rope_partial_rotary_factor": full[1],
    }


def rope_fields(where: str, rope: Rope) -> dict[str, Any]:
    """Returns the fields of the "local" or the "global" layers."""
    names = ("wavelength", "scaling_factor", "yarn")
    return {f"{where}_rope_{name}": value for name, value in zip(names, rope, strict=True)}


def rope_of_kind(
    path: Path, kind: str, scaling: Mapping[str, Any], given: float | None, default: float
) -> Rope:
    """Returns what `decoder.rope` does, of the layers of one kind.

    transformers then reads the length of YaRN in its own settings alone, and no `truncate`.
    """
    if decoder.rope_kind(scaling) == "yarn" and scaling.get("truncate") is False:
        raise InputError(
            f"{path}: rope_parameters of {kind} has truncate=false, which transformers does not "
            "follow by kinds of layers; leave it out"
        )
    return decoder.rope(path, scaling, given, default)


def _rope(path: Path, kind: str, given: Mapping[str, Any]) -> tuple[Rope, float]:
    """Returns the rotary embedding of a kind of layers, and the share of channels that turn."""
    if given.get("rope_type") != "proportional":
        return rope_of_kind(path, kind, given, None, 10_000.0), 1.0
    usual = {"rope_theta": 10_000.0, "factor": 1.0, "partial_rotary_factor": 1.0}
    base, scaling, turned = (float(given.get(name, value)) for name, value in usual.items())
    return Rope(base, scaling, None), turned


def rope_parameters(config: GemmaConfig) -> dict[str, Any]:
    """Returns the rotary embeddings by kind of layer as transformers 5 writes them."""
    found = {}
    for kind, where in ((LOCAL, "local"), (GLOBAL, "global")):
        names = ("wavelength", "scaling_factor", "yarn")
        base, factor, yarn = (getattr(config, f"{where}_rope_{name}") for name in names)
        form = decoder.rope_form(base, factor, yarn)
        scaling = form.get("rope_scaling") or {"rope_type": "default"}
        found[kind] = {**scaling, "rope_theta": form["rope_theta"]}
    return found


def form(config: GemmaConfig) -> dict[str, Any]:
    """Returns what config.json says of a Gemma 4 besides, in both spellings."""
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


def otherwise(config: GemmaConfig) -> dict[str, object]:
    """Returns what each Gemma 4 has and this config leaves out, as `lacks` does."""
    always = [name for name in GEMMA_4 if name.startswith("use_") and "window" not in name]
    found = {f"{name}=False": not getattr(config, name) for name in always}
    return {**found, "this query scale": config.query_scale != 1.0}


def lacks_of_yarn(config: GemmaConfig) -> dict[str, object]:
    """Returns what transformers does not follow where kinds of layers differ, as `lacks` does."""
    settings = {where: getattr(config, f"{where}_rope_yarn") for where in ("local", "global")}
    return {
        f"truncate=False in {where}_rope_yarn": yarn is not None and not yarn.get("truncate", True)
        for where, yarn in settings.items()
    }


def lacks(config: GemmaConfig) -> dict[str, object]:
    """Returns what transformers' Gemma 4 has no counterpart for: names to whether it is there."""
    return {
        **otherwise(config),
        **lacks_of_yarn(config),
        "attention_logit_soft_cap": config.attention_logit_soft_cap,
        "use_bidirectional_attention": config.use_bidirectional_attention,
        "a last layer with sliding_attention": config.kinds[-1] == LOCAL,
        "use_sliding_window_attention=False": (
            LOCAL in config.kinds and not config.use_sliding_window_attention
        ),
    }
