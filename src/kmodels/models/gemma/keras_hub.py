"""keras-hub's Gemma 1 to 4 (0.32): variables, arguments, and settings that it does not support.

One class of keras-hub serves Gemma 1 and 2. The norms of its blocks have an epsilon of 1e-6 for any
setting; queries are always divided by the root of `head_dim`, for any `query_head_dim_normalize`;
windows repeat every 2 blocks, in Gemma 3 every 6. Its Gemma 4 follows all settings; a number of
key/value heads for global layers makes their keys the values too.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from kmodels.models.blocks.keras_hub_mapping import KerasHubMapping, Settings
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.huggingface import otherwise_than_4
from kmodels.models.gemma.model import GROUPS, ROPES, Gemma3Backbone, GemmaBackbone, hub_fields_4
from kmodels.models.gemma.tasks import Gemma3CausalLM, GemmaCausalLM
from kmodels.weights import Rule, Transform, reshape

BLOCK = "decoder_block_{i}"


def rules(config: GemmaConfig) -> list[Rule]:
    """Returns the rules of a config, with keras-hub's paths."""
    norms = {"pre_attention_norm": "attention_norm", "pre_ffw_norm": "mlp_norm"}
    if config.use_post_attention_norm:
        norms["post_attention_norm"] = "post_attention_norm"
    if config.use_post_ffw_norm:
        norms["post_ffw_norm"] = "post_mlp_norm"
    if config.use_query_key_norm:
        norms["attention/query_norm"] = "attention/query_norm"
        norms["attention/key_norm"] = "attention/key_norm"
    kernels = {"ffw_gating": "mlp/gate", "ffw_gating_2": "mlp/up", "ffw_linear": "mlp/down"}
    table = [
        Rule("token_embedding/embeddings", "token_embedding/embeddings"),
        *_attention(config),
        *(Rule(f"{BLOCK}/{a}/kernel", f"block_{{i}}/{b}/kernel") for a, b in kernels.items()),
        *(Rule(f"{BLOCK}/{a}/scale", f"block_{{i}}/{b}/scale") for a, b in norms.items()),
        Rule("final_normalization/scale", "final_norm/scale"),
    ]
    settings, within, ours = config.block(0), "per_layer_embedding", "block_{i}/per_layer"
    if settings.per_layer_dim:
        table += [
            Rule("per_layer_token_embedding/embeddings", f"{within}/table/embeddings"),
            Rule("per_layer_model_projection/kernel", f"{within}/model_projection/kernel"),
            Rule("per_layer_projection_norm/scale", f"{within}/norm/scale"),
            Rule(f"{BLOCK}/per_layer_input_gate/kernel", f"{ours}/input_gate/kernel"),
            Rule(f"{BLOCK}/per_layer_up_proj/kernel", f"{ours}/projection/kernel"),
            Rule(f"{BLOCK}/post_per_layer_input_norm/scale", f"{ours}/norm/scale"),
        ]
    if settings.use_layer_scalar:
        table.append(Rule(f"{BLOCK}/layer_scalar", "block_{i}/layer_scalar", reshape((), (1,))))
    return table


def _attention(config: GemmaConfig) -> list[Rule]:
    """Returns the rules of the attention of each block, whose heads keras-hub keeps apart."""
    table, width = [], config.hidden_dim
    for i in range(config.num_layers):
        block, ours = config.block(i), f"block_{i}/attention"
        theirs, size = f"{BLOCK.format(i=i)}/attention", block.head_dim
        heads = {"query": block.num_query_heads}
        if block.key_value_source is None:
            heads["key"] = block.num_key_value_heads
            if not block.key_is_value:
                heads["value"] = block.num_key_value_heads
        for name, number in heads.items():
            rule = _heads_first(number, width, size)
            table.append(Rule(f"{theirs}/{name}/kernel", f"{ours}/{name}/kernel", rule))
        number = block.num_query_heads
        joined = reshape((number, size, width), (number * size, width))
        table.append(Rule(f"{theirs}/attention_output/kernel", f"{ours}/output/kernel", joined))
    return table


def _heads_first(heads: int, width: int, head_dim: int) -> Transform:
    """(N, D, H) <-> (D, N * H)."""
    return Transform(
        lambda x: np.transpose(x, (1, 0, 2)).reshape(width, heads * head_dim),
        lambda x: np.transpose(x.reshape(width, heads, head_dim), (1, 0, 2)),
    )


# === Arguments ===

EPSILON = 1e-6
PATTERNS = {"gemma": 2, "gemma3": 6}
SHARED = (
    *("vocabulary_size", "num_layers", "num_query_heads", "num_key_value_heads", "hidden_dim"),
    *("head_dim", "layer_norm_epsilon", "dropout", "query_head_dim_normalize"),
    *("use_post_ffw_norm", "use_post_attention_norm", "attention_logit_soft_cap"),
    *("final_logit_soft_cap", "use_sliding_window_attention", "sliding_window_size"),
)
ROPE_SCALING = ("local_rope_scaling_factor", "global_rope_scaling_factor")
ONE_ROPE = dict.fromkeys(ROPES, 10_000.0)
STRANGE_4 = ("use_bidirectional_attention", "is_embedding_model", "enable_moe_block")
# Arguments of Gemma 4 with the same name in both packages.
SHARED_4 = (
    *(name for name in SHARED if "post" not in name and name != "query_head_dim_normalize"),
    *("intermediate_dim", "layer_types", "sliding_window_pattern", "num_kv_shared_layers"),
    *("use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("global_head_dim", "global_rope_partial_rotary_factor", *ROPE_SCALING),
)


def _strange(config: Settings, task: Settings) -> list[str]:
    """Returns unsupported settings, and those that keras-hub's blocks ignore."""
    epsilon = config["layer_norm_epsilon"]
    size, width = config["head_dim"], config["hidden_dim"] // config["num_query_heads"]
    problems = {
        f"layer_norm_epsilon={epsilon}": epsilon != EPSILON,
        "query_head_dim_normalize=False, which keras-hub ignores": (
            not config["query_head_dim_normalize"] and width != size
        ),
        "use_bidirectional_attention": bool(config.get("use_bidirectional_attention")),
        "is_embedding_model": bool(config.get("is_embedding_model")),
    }
    return [name for name, there in problems.items() if there]


def _fields(config: Settings) -> dict[str, Any]:
    return {name: config[name] for name in (*SHARED, "intermediate_dim")}


def _arguments(config: GemmaConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SHARED} | {"query_head_dim_normalize": True}


def _lacks(config: GemmaConfig, pattern: int, ropes: dict[str, float]) -> dict[str, bool]:
    """Returns the settings that no generation supports; rotary ones only if a block uses them."""
    local = [config.is_local(i) for i in range(config.num_layers)]
    same = [
        config.use_sliding_window_attention and bool((i + 1) % pattern) for i in range(len(local))
    ]
    used = {"local_rope_wavelength": any(local), "global_rope_wavelength": not all(local)}
    return {
        f"layer_norm_epsilon={config.layer_norm_epsilon}": config.layer_norm_epsilon != EPSILON,
        f"a query scale of {config.query_scale:.6g}, since it always takes that of head_dim": (
            abs(config.query_scale - config.head_dim**-0.5) > 1e-9
        ),
        (
            f"sliding_window_pattern={config.sliding_window_pattern}"
            if config.layer_types is None
            else "these layer_types"
        ): local != same,
        # keras-hub's bidirectional windows are one token shorter than transformers'.
        "use_bidirectional_attention": config.use_bidirectional_attention,
        **dict.fromkeys(config.of_gemma_4, True),
        **_absent(config),
        **{
            f"{name}={getattr(config, name)}": there and getattr(config, name) != ropes[name]
            for name, there in used.items()
        },
    }


def _absent(config: GemmaConfig) -> dict[str, bool]:
    yarn = ("local_rope_yarn", "global_rope_yarn")
    problems = {name: getattr(config, name) is not None for name in yarn}
    return {"tie_word_embeddings=False": not config.tie_word_embeddings, **problems}


def _gemma_lacks(config: GemmaConfig, settings: Settings) -> list[str]:
    local = [config.is_local(i) for i in range(config.num_layers)]
    problems = _lacks(config, PATTERNS["gemma"], ONE_ROPE) | {
        f"{name}={getattr(config, name)}": there and getattr(config, name) != 1.0
        for name, there in zip(ROPE_SCALING, (any(local), not all(local)), strict=True)
    }
    return [name for name, there in problems.items() if there]


def _gemma_4_fields(config: Settings) -> dict[str, Any]:
    return hub_fields_4({name: config[name] for name in (*SHARED_4, *ROPES, GROUPS)})


def _gemma_4_lacks(config: GemmaConfig, settings: Settings) -> list[str]:
    own = config.num_global_key_value_heads and not config.attention_k_eq_v
    problems = {**otherwise_than_4(config), f"{GROUPS} without attention_k_eq_v": own}
    problems |= {name: getattr(config, name, False) for name in STRANGE_4} | _absent(config)
    return [name for name, there in problems.items() if there]


GEMMA = KerasHubMapping(
    backbone="GemmaBackbone",
    task="GemmaCausalLM",
    ours=GemmaBackbone,
    our_task=GemmaCausalLM,
    fields=_fields,
    unsupported_in=_strange,
    arguments=lambda config: {**_arguments(config), "intermediate_dim": 2 * config.mlp_dim},
    table=rules,
    belongs=lambda config, settings: not config.use_query_key_norm,
    unsupported_out=_gemma_lacks,
)
GEMMA3 = replace(
    GEMMA,
    backbone="Gemma3Backbone",
    task="Gemma3CausalLM",
    ours=Gemma3Backbone,
    our_task=Gemma3CausalLM,
    fields=lambda config: {
        **_fields(config),
        **{name: config[name] for name in ROPE_SCALING},
        "use_query_key_norm": config["use_query_key_norm"],
        "gate_dim_reduction": 1,
        "sliding_window_pattern": PATTERNS["gemma3"],
        **ROPES,
    },
    arguments=lambda config: {
        **_arguments(config),
        **{name: getattr(config, name) for name in ROPE_SCALING},
        "intermediate_dim": config.mlp_dim,
        "use_query_key_norm": True,
        "image_size": None,
    },
    belongs=lambda config, settings: config.use_query_key_norm,
    unsupported_out=lambda config, settings: [
        name for name, there in _lacks(config, PATTERNS["gemma3"], ROPES).items() if there
    ],
    ignored=("vision_encoder",),
)
GEMMA4 = replace(
    GEMMA,
    backbone="Gemma4Backbone",
    task="Gemma4CausalLM",
    fields=_gemma_4_fields,
    unsupported_in=lambda given, task: [
        name for name in (*STRANGE_4, "final_logit_cap") if {**given, **task}.get(name)
    ],
    arguments=lambda config: {
        **{name: getattr(config, name) for name in (*SHARED_4, *ROPES)},
        "layer_types": list(config.kinds),
        GROUPS: (getattr(config, GROUPS) or config.num_key_value_heads)
        if config.attention_k_eq_v
        else None,
        "image_size": None,
    },
    belongs=lambda config, settings: config.generation == 4,
    unsupported_out=_gemma_4_lacks,
    ignored=("vision_encoder", "audio_encoder"),
)
PEERS = (GEMMA4, GEMMA3, GEMMA)
