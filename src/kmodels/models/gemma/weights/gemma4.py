"""What a config.json of Gemma 4 says of its text part, in both spellings, and writing it again.

Transformers 5.23 writes `per_layer_config`, the settings by which a layer differs from all. Before,
and in keras-hub, `global_head_dim` and `num_global_key_value_heads` say it of the global layers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.common import huggingface as decoder
from kmodels.models.gemma.config import GLOBAL, LOCAL, GemmaConfig
from kmodels.models.gemma.presets import GEMMA_4

HEADS = ("head_dim", "num_key_value_heads")
# Fields of `GemmaConfig` whose names are the same in a config.json.
SAME = (
    *("attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp"),
    "hidden_size_per_layer_input",
)
ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")


def fields(path: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a config.json, whose defaults are filled in.

    Raises:
        InputError: for a mixture of experts, or settings that the model has no counterpart for.
    """
    if text.get("enable_moe_block"):
        raise InputError(
            f"{path} is a mixture of experts; the model reads the dense sizes of Gemma 4"
        )
    if text.get("use_bidirectional_attention") == "all":
        decoder.refuse(path, {"use_bidirectional_attention='all'": True})
    layers = text["num_hidden_layers"]
    kinds = text.get("layer_types") or [GLOBAL if i % 6 == 5 else LOCAL for i in range(layers)]
    kinds = [*kinds[:-1], GLOBAL]  # transformers' last layer is global, whatever is said of it
    heads = _heads(path, text, kinds)
    local, everywhere = heads.get(LOCAL) or heads[GLOBAL], heads[GLOBAL]
    given = text.get("rope_parameters") or {}
    ropes = {kind: _rope(path, given.get(kind) or ROPES[kind]) for kind in ROPES}
    if ropes[LOCAL][2] != 1.0:
        decoder.refuse(path, {"a partial_rotary_factor of sliding_attention": True})
    return {
        **decoder.fields({**text, **dict(zip(HEADS, local, strict=True))}),
        **GEMMA_4,
        **{name: text[name] for name in SAME},
        "layer_types": kinds,
        "global_head_dim": everywhere[0] if everywhere[0] != local[0] else None,
        "num_global_key_value_heads": everywhere[1] if everywhere[1] != local[1] else None,
        "sliding_window_size": text["sliding_window"],
        "final_logit_soft_cap": text["final_logit_softcapping"],
        "vocab_size_per_layer_input": (
            text["vocab_size_per_layer_input"] if text["hidden_size_per_layer_input"] else None
        ),
        "local_rope_wavelength": ropes[LOCAL][0],
        "local_rope_scaling_factor": ropes[LOCAL][1],
        "global_rope_wavelength": ropes[GLOBAL][0],
        "global_rope_scaling_factor": ropes[GLOBAL][1],
        "global_rope_partial_rotary_factor": ropes[GLOBAL][2],
    }


def _heads(path: Path, text: Mapping[str, Any], kinds: list[str]) -> dict[str, tuple[int, int]]:
    """Returns the width and the number of key/value heads in each kind of layer."""
    by_layer = text.get("per_layer_config")
    if by_layer is None:
        own = {"head_dim": text.get("global_head_dim") or 512}
        if text["attention_k_eq_v"] and (groups := text.get("num_global_key_value_heads")):
            own["num_key_value_heads"] = groups
        by_layer = {i: own for i, kind in enumerate(kinds) if kind == GLOBAL}
    by_layer = {int(i): own for i, own in by_layer.items()}
    names = {name for own in by_layer.values() for name in own}
    found: dict[str, set[tuple[int, int]]] = {}
    for i, kind in enumerate(kinds):
        layer = {**text, **by_layer.get(i, {})}
        found.setdefault(kind, set()).add((layer["head_dim"], layer["num_key_value_heads"]))
    wrong = {f"{name} in per_layer_config": True for name in sorted(names - set(HEADS))}
    wrong |= {f"different heads in {kind}": len(all_) > 1 for kind, all_ in found.items()}
    decoder.refuse(path, wrong)
    return {kind: next(iter(all_)) for kind, all_ in found.items()}


def _rope(path: Path, given: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns the base of a rotary embedding, what divides positions, and the share that turns."""
    if given.get("rope_type") != "proportional":
        return *decoder.rope(path, given, None, 10_000.0), 1.0
    names = {"rope_theta": 10_000.0, "factor": 1.0, "partial_rotary_factor": 1.0}
    base, scaling, turned = (float(given.get(name, usual)) for name, usual in names.items())
    return base, scaling, turned


def unused(config: GemmaConfig) -> list[str]:
    """Returns ends of names that published files hold, and transformers leaves out as well.

    They are the keys and values of layers that use those of others.
    """
    shared = [i for i in range(config.num_layers) if config.source(i) is not None]
    return [f"layers.{i}.self_attn.{name}.weight" for i in shared for name in UNUSED]


def form(config: GemmaConfig) -> dict[str, Any]:
    """Returns what config.json says of a Gemma 4 besides, in both spellings."""
    kinds, width = list(config.kinds), config.global_head_dim or config.head_dim
    groups = config.num_global_key_value_heads or config.num_key_value_heads
    differs = {"head_dim": width, "num_key_value_heads": groups}
    differs = {name: value for name, value in differs.items() if value != getattr(config, name)}
    everywhere = {"rope_type": "proportional", "rope_theta": config.global_rope_wavelength}
    everywhere["partial_rotary_factor"] = config.global_rope_partial_rotary_factor
    everywhere["factor"] = config.global_rope_scaling_factor
    local = decoder.rope_form(config.local_rope_wavelength, config.local_rope_scaling_factor)
    local = {"rope_type": "default", "rope_theta": local["rope_theta"]} | local.get(
        "rope_scaling", {}
    )
    return {
        **{name: getattr(config, name) for name in SAME},
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": config.sliding_window_size,
        "final_logit_softcapping": config.final_logit_soft_cap,
        "vocab_size_per_layer_input": config.per_layer_vocabulary,
        "rope_parameters": {LOCAL: local, GLOBAL: everywhere},
        "per_layer_config": {
            str(i): differs for i, kind in enumerate(kinds) if differs and kind == GLOBAL
        },
        "global_head_dim": width,
        **({"num_global_key_value_heads": groups} if config.attention_k_eq_v else {}),
    }


def lacks(config: GemmaConfig) -> dict[str, object]:
    """Returns what transformers' Gemma 4 has no counterpart for: names to whether it is there."""
    return {
        "attention_logit_soft_cap": config.attention_logit_soft_cap,
        "this query scale": config.query_scale != 1.0,
        "use_query_key_norm=False": not config.use_query_key_norm,
        "use_value_norm=False": not config.use_value_norm,
        "use_layer_scalar=False": not config.use_layer_scalar,
        "a norm behind attention and MLP left out": not (
            config.use_post_ffw_norm and config.use_post_attention_norm
        ),
        "a last layer with sliding_attention": config.kinds[-1] == LOCAL,
        "use_sliding_window_attention=False": (
            LOCAL in config.kinds and not config.use_sliding_window_attention
        ),
    }
