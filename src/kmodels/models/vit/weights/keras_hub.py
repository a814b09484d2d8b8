"""Conversion from and to keras-hub's ViT, DeiT, DINOv2, DINOv3 and SigLIP.

The facts are those of keras-hub 0.32. Dropout and stochastic depth act in training only and are
converted if both packages have them.
"""

from collections.abc import Callable
from typing import Any

from kmodels.models.blocks.encoder_config import GELUS
from kmodels.models.blocks.keras_hub_mapping import KerasHubMapping, Settings, dense, norm, numbered
from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.weights.augreg import attention, patches
from kmodels.models.vit.weights.dinov2 import gated_dim
from kmodels.models.vit.weights.huggingface_export import (
    BIAS,
    LOGITS,
    NONE,
    RATIOS,
    ROTARY,
    UNBIASED,
    lacking,
)
from kmodels.weights import Rule, leading_axes

GATED = ("block_{i}/mlp/gate", "block_{i}/mlp/up")
OUTPUT = "attention_output"
POSITIONS = "tokens/position_embedding"


def vit(config: ViTConfig) -> list[Rule]:
    """Returns the table of `ViTBackbone` and `ViTImageClassifier`, whose blocks count from 1."""
    block, front = "vit_encoder/transformer_block_{i}", "vit_patching_and_embedding"
    table = [
        Rule(f"{front}/class_token", "tokens/class_token"),
        Rule(f"{front}/position_embedding/embeddings", POSITIONS, leading_axes(1)),
        *patches(config, f"{front}/patch_embedding"),
        *norm(f"{block}/ln_1", "block_{i}/attention_norm"),
        *attention(config, f"{block}/mha", "block_{i}/attention", OUTPUT),
        *norm(f"{block}/ln_2", "block_{i}/mlp_norm"),
        *dense(f"{block}/mlp/dense_1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp/dense_2", "block_{i}/mlp/down"),
        *norm("vit_encoder/ln", "final_norm"),
        *dense("pre_logits", "pre_logits"),
        *dense("predictions", "logits"),
    ]
    return numbered(table, config.num_layers, 1)


def deit(config: ViTConfig) -> list[Rule]:
    """Returns the table of `DeiTBackbone` and `DeiTImageClassifier`, whose blocks count from 1."""
    block, front = "deit_encoder/transformer_block_{i}", "deit_patching_and_embedding"
    table = [
        Rule(f"{front}/class_token", "tokens/class_token"),
        Rule(f"{front}/distillation_token", "tokens/distillation_token"),
        Rule(f"{front}/position_embedding", POSITIONS),
        *patches(config, f"{front}/patch_embedding"),
        *norm(f"{block}/ln_1", "block_{i}/attention_norm"),
        *attention(config, f"{block}/mha", "block_{i}/attention", OUTPUT),
        *norm(f"{block}/ln_2", "block_{i}/mlp_norm"),
        *dense(f"{block}/mlp/dense", "block_{i}/mlp/up"),
        *dense(f"{block}/output_layer/output", "block_{i}/mlp/down"),
        *norm("deit_encoder/ln", "final_norm"),
        *dense("predictions", "logits"),
    ]
    return numbered(table, config.num_layers, 1)


def dinov2(config: ViTConfig) -> list[Rule]:
    """Returns the table of `DINOV2Backbone`, whose SwiGLU stores the gate first."""
    block = "encoder/layers_{i}"
    mlp = [
        *dense(f"{block}/mlp/fc1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp/fc2", "block_{i}/mlp/down"),
    ]
    if config.use_swiglu_ffn:
        kernels, biases = ([f"{path}/{part}" for path in GATED] for part in ("kernel", "bias"))
        mlp = [
            Rule(f"{block}/mlp/weights_in/kernel", kernels, axis=1),
            Rule(f"{block}/mlp/weights_in/bias", biases),
            *dense(f"{block}/mlp/weights_out", "block_{i}/mlp/down"),
        ]
    return [
        Rule("embeddings/cls_token", "tokens/class_token"),
        Rule("embeddings/mask_token", "tokens/mask_token", leading_axes(1)),
        Rule("embeddings/register_tokens", "tokens/register_tokens"),
        Rule("embeddings/interpolated_position_embeddings", POSITIONS),
        *patches(config, "embeddings/patch_embeddings/projection"),
        *norm(f"{block}/norm1", "block_{i}/attention_norm"),
        *attention(config, f"{block}/attention/attention", "block_{i}/attention", OUTPUT),
        Rule(f"{block}/layer_scale1/lambda1", "block_{i}/attention_scale/scale"),
        *norm(f"{block}/norm2", "block_{i}/mlp_norm"),
        *mlp,
        Rule(f"{block}/layer_scale2/lambda1", "block_{i}/mlp_scale/scale"),
        *norm("layernorm", "final_norm"),
    ]


def dinov3(config: ViTConfig) -> list[Rule]:
    """Returns the table of `DINOV3Backbone`."""
    block = "encoder/layers_{i}"
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    layers = {f"attention/{ours}": f"attention/{theirs}" for ours, theirs in parts.items()}
    layers |= {f"mlp/{name}": f"mlp/{name}_proj" for name in ("gate", "up", "down")}
    return [
        Rule("embeddings/cls_token", "tokens/class_token"),
        Rule("embeddings/mask_token", "tokens/mask_token"),
        Rule("embeddings/register_tokens", "tokens/register_tokens"),
        *patches(config, "embeddings/patch_embeddings/projection"),
        *norm(f"{block}/norm1", "block_{i}/attention_norm"),
        *norm(f"{block}/norm2", "block_{i}/mlp_norm"),
        *(
            rule
            for ours, theirs in layers.items()
            for rule in dense(f"{block}/{theirs}", f"block_{{i}}/{ours}")
        ),
        Rule(f"{block}/layer_scale1/lambda1", "block_{i}/attention_scale/scale"),
        Rule(f"{block}/layer_scale2/lambda1", "block_{i}/mlp_scale/scale"),
        *norm("layernorm", "final_norm"),
    ]


def siglip(config: ViTConfig) -> list[Rule]:
    """Returns the table of `SigLIPVisionEncoder`, whose backbone includes the pooling."""
    block = "encoder_block_{i}"
    return [
        Rule("embedding/position_embedding/embeddings", POSITIONS, leading_axes(1)),
        *patches(config, "embedding/patch_embedding"),
        *attention(config, f"{block}/self_attn", "block_{i}/attention", OUTPUT),
        *norm(f"{block}/layer_norm1", "block_{i}/attention_norm"),
        *dense(f"{block}/mlp/fc1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp/fc2", "block_{i}/mlp/down"),
        *norm(f"{block}/layer_norm2", "block_{i}/mlp_norm"),
        *norm("post_layer_norm", "final_norm"),
        Rule("head/probe", "pooling/probe"),
        *attention(config, "head/attention", "pooling/attention", OUTPUT),
        *norm("head/layernorm", "pooling/mlp_norm"),
        *dense("head/mlp/fc1", "pooling/mlp/up"),
        *dense("head/mlp/fc2", "pooling/mlp/down"),
    ]


# keras-hub's norms have no other in DINOv2, nor behind SigLIP's last block.
EPSILON = 1e-6
SHARED = ("num_layers", "num_heads", "hidden_dim")
DEIT_NAMES = ("dropout_rate", "attention_dropout", "layer_norm_epsilon", "use_mha_bias")
VIT_NAMES = (*DEIT_NAMES, "use_mlp_bias", "use_class_token", "use_patch_bias")
DINOV2_NAMES = (
    *("num_register_tokens", "use_mask_token", "use_swiglu_ffn", "dropout_rate"),
    "drop_path_rate",
)
DINOV3_NAMES = (
    *("num_register_tokens", "use_mask_token", "attention_dropout", "drop_path_rate"),
    *("use_query_bias", "use_key_bias", "use_value_bias", "use_proj_bias", "use_mlp_bias"),
    "rope_theta",
)
MOVES = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
MAP = {"num_classes": 0, "pooling": "map"}


def _fields(config: Settings, *names: str, **more: Any) -> dict[str, Any]:
    patch = config["patch_size"]
    return {
        **{name: config[name] for name in (*SHARED, *names)},
        "image_shape": tuple(config["image_shape"]),
        "patch_size": patch if isinstance(patch, int) else patch[0],
        "mlp_dim": config.get("mlp_dim", config.get("intermediate_dim")),
        **more,
    }


def _strange(config: Settings, task: Settings) -> list[str]:
    patch = config["patch_size"]
    return [] if isinstance(patch, int) or patch[0] == patch[1] else [f"patches of {patch} pixels"]


def _arguments(config: ViTConfig, *names: str) -> dict[str, Any]:
    shared = ("image_shape", "patch_size", *SHARED, *names)
    return {name: getattr(config, name) for name in shared}


def _lacks(
    can: set[str],
    heads: set[tuple[str | None, str]],
    more: Callable[[ViTConfig, Settings], dict[str, bool]],
) -> Callable[[ViTConfig, Settings], list[str]]:
    """Returns a function that lists the problems of `lacking` and of `more`."""

    def unsupported_out(config: ViTConfig, settings: Settings) -> list[str]:
        own = [text for text, there in more(config, settings).items() if there]
        return [*lacking(config, settings, can, heads), *own]

    return unsupported_out


def _gelu(config: ViTConfig) -> dict[str, bool]:
    value = config.approximate_gelu
    return {f"approximate_gelu={value!r}": value is not False}


def _biases(config: ViTConfig) -> dict[str, bool]:
    return {
        "use_patch_bias=False": not config.use_patch_bias,
        "use_mlp_bias=False": not config.use_mlp_bias,
    }


def _fixed(config: ViTConfig) -> dict[str, bool]:
    """Returns settings that neither DINOv2 nor SigLIP supports."""
    height, width = config.image_shape[:2]
    return {
        **_biases(config),
        f"images of {height} x {width} pixels": height != width,
        "use_mha_bias=False": not config.use_mha_bias,
        f"layer_norm_epsilon={config.layer_norm_epsilon}": config.layer_norm_epsilon != EPSILON,
    }


def _settings(config: Settings) -> dict[str, Any]:
    names = ("num_classes", "pooling", "intermediate_dim", "activation", "dropout")
    return {name: config[name] for name in names if name in config}


def _head(settings: Settings) -> dict[str, Any]:
    activation = settings.get("activation")
    return {**_settings(settings), "activation": None if activation == "linear" else activation}


def _vit_lacks(config: ViTConfig, settings: Settings) -> dict[str, bool]:
    gap = settings.get("pooling") == "gap" and config.use_class_token
    return {**_gelu(config), 'pooling="gap" beside a class token, which it takes in': gap}


def _strange_gap(config: Settings, task: Settings) -> list[str]:
    # Its mean takes in every token, as ours does without a class token.
    mean = task.get("pooling") == "gap" and config.get("use_class_token", True)
    return [
        *_strange(config, task),
        *(['pooling="gap" that takes in the class token'] if mean else []),
    ]


VIT = KerasHubMapping(
    backbone="ViTBackbone",
    task="ViTImageClassifier",
    ours=ViTBackbone,
    our_task=ViTImageClassifier,
    unsupported_in=_strange_gap,
    fields=lambda given: _fields(given, *VIT_NAMES),
    arguments=lambda config: _arguments(config, "mlp_dim", *VIT_NAMES),
    settings=_settings,
    head=_head,
    table=vit,
    belongs=lambda config, settings: True,
    unsupported_out=_lacks(
        {BIAS, "use_class_token=False", "intermediate_dim", "a pooler", "an activation"},
        {("token", LOGITS), ("gap", LOGITS)},
        _vit_lacks,
    ),
)
DEIT = KerasHubMapping(
    backbone="DeiTBackbone",
    task="DeiTImageClassifier",
    ours=ViTBackbone,
    our_task=ViTImageClassifier,
    unsupported_in=_strange_gap,
    fields=lambda given: _fields(
        given, *DEIT_NAMES, use_distillation_token=True, position_interpolation="bicubic"
    ),
    arguments=lambda config: {
        **_arguments(config, *DEIT_NAMES),
        "intermediate_dim": config.mlp_dim,
    },
    settings=_settings,
    head=lambda settings: {k: v for k, v in _head(settings).items() if k != "intermediate_dim"},
    table=deit,
    belongs=lambda config, settings: config.use_distillation_token,
    unsupported_out=_lacks(
        {BIAS, "a distillation token", "an activation"},
        {("token", LOGITS)},
        lambda config, settings: {**_gelu(config), **_biases(config)},
    ),
)


def _ratio(config: ViTConfig) -> int | None:
    """Returns the MLP width of which DINOv2's gate has two thirds."""
    for ratio in RATIOS:
        if gated_dim(config.hidden_dim, ratio) == config.mlp_dim:
            return ratio * config.hidden_dim
    return None


def _dinov2_fields(config: Settings) -> dict[str, Any]:
    gated, width = config["use_swiglu_ffn"], config["intermediate_dim"]
    return _fields(
        config,
        *DINOV2_NAMES,
        mlp_dim=gated_dim(width, 1) if gated else width,
        layer_scale=config["layer_scale_init_value"],
        attention_dropout=config["dropout_rate"],
        position_interpolation=(
            "bicubic_antialias" if config["antialias_in_interpolation"] else "bicubic"
        ),
    )


def _dinov2_lacks(config: ViTConfig, settings: Settings) -> dict[str, bool]:
    gated = config.use_swiglu_ffn
    return {
        **_gelu(config),
        **_fixed(config),
        f"mlp_dim={config.mlp_dim} with SwiGLU": gated and _ratio(config) is None,
        "a head (give model.backbone)": bool(settings),
    }


DINOV2 = KerasHubMapping(
    backbone="DINOV2Backbone",
    task=None,
    ours=ViTBackbone,
    our_task=ViTImageClassifier,
    unsupported_in=_strange,
    fields=_dinov2_fields,
    arguments=lambda config: {
        **_arguments(config, *DINOV2_NAMES),
        "intermediate_dim": _ratio(config) if config.use_swiglu_ffn else config.mlp_dim,
        "layer_scale_init_value": config.layer_scale,
        "position_embedding_shape": config.image_shape,
        "antialias_in_interpolation": config.position_interpolation == "bicubic_antialias",
    },
    table=dinov2,
    belongs=lambda config, settings: config.layer_scale is not None,
    unsupported_out=_lacks(
        {BIAS, "layer_scale", "register tokens", "a mask token", "SwiGLU"},
        {(None, NONE)},
        _dinov2_lacks,
    ),
    # The table that was trained, from which the one in use is made for the size of the images.
    copies={"embeddings/position_embeddings": "embeddings/interpolated_position_embeddings"},
)


def _dinov3_strange(config: Settings, task: Settings) -> list[str]:
    name, gated = config["hidden_activation"], config["use_gated_mlp"]
    odd = name != ("silu" if gated else "gelu")
    return [
        *_strange(config, task),
        *([f"hidden_activation={name!r} with use_gated_mlp={gated}"] if odd else []),
    ]


def _dinov3_lacks(config: ViTConfig, settings: Settings) -> dict[str, bool]:
    moves = {f"{name}={getattr(config, name)}": True for name in MOVES if getattr(config, name)}
    return {
        **_gelu(config),
        **moves,
        "use_patch_bias=False": not config.use_patch_bias,
        "use_mha_bias=False": not config.use_mha_bias,
        f"dropout_rate={config.dropout_rate}": bool(config.dropout_rate),
        "a head (give model.backbone)": bool(settings),
    }


DINOV3 = KerasHubMapping(
    backbone="DINOV3Backbone",
    task=None,
    ours=ViTBackbone,
    our_task=ViTImageClassifier,
    unsupported_in=_dinov3_strange,
    fields=lambda given: _fields(
        given,
        *DINOV3_NAMES,
        layer_scale=given["layer_scale_init_value"],
        layer_norm_epsilon=given["layer_norm_eps"],
        use_swiglu_ffn=given["use_gated_mlp"],
        use_position_embedding=False,
    ),
    arguments=lambda config: {
        **_arguments(config, *DINOV3_NAMES),
        "intermediate_dim": config.mlp_dim,
        "layer_scale_init_value": config.layer_scale,
        "layer_norm_eps": config.layer_norm_epsilon,
        "use_gated_mlp": config.use_swiglu_ffn,
        "hidden_activation": "silu" if config.use_swiglu_ffn else "gelu",
    },
    table=dinov3,
    belongs=lambda config, settings: config.rope_theta is not None,
    unsupported_out=_lacks(
        {
            *(BIAS, UNBIASED, ROTARY, "layer_scale", "register tokens", "a mask token", "SwiGLU"),
            "use_position_embedding=False",
        },
        {(None, NONE)},
        _dinov3_lacks,
    ),
)
SIGLIP = KerasHubMapping(
    backbone="SigLIPVisionEncoder",
    task=None,
    ours=ViTBackbone,
    our_task=ViTImageClassifier,
    fields=lambda given: _fields(
        given,
        use_class_token=False,
        layer_norm_epsilon=given["layer_norm_epsilon"],
        approximate_gelu=GELUS.get(given["intermediate_activation"], False),
        position_interpolation="bicubic",
    ),
    unsupported_in=lambda given, task: [
        *_strange(given, task),
        *(
            [f"intermediate_activation={given['intermediate_activation']!r}"]
            if given["intermediate_activation"] not in GELUS
            else []
        ),
    ],
    arguments=lambda config: {
        **_arguments(config, "layer_norm_epsilon"),
        "intermediate_dim": config.mlp_dim,
        "intermediate_activation": next(
            name for name, value in GELUS.items() if value == config.approximate_gelu
        ),
    },
    table=siglip,
    belongs=lambda config, settings: settings.get("pooling") == "map",
    unsupported_out=_lacks(
        {BIAS, "use_class_token=False", "positions of native aspect ratio"},
        {("map", NONE)},
        lambda config, settings: {
            **_fixed(config),
            "a class token": config.use_class_token,
            f"dropout_rate={config.dropout_rate}": bool(config.dropout_rate),
            f"attention_dropout={config.attention_dropout}": bool(config.attention_dropout),
        },
    ),
    pooled=MAP,
    inside={"SigLIPBackbone": "vision_encoder"},
    copies={"embedding/position_ids": None},
    renamed={r"head/variable(_\d+)?": "head/probe"},
)
PEERS = (DEIT, DINOV3, DINOV2, SIGLIP, VIT)
