"""Conversion from and to keras-hub's ViT, DeiT, DINOv2, DINOv3 and SigLIP.

The facts are those of keras-hub 0.32. Dropout and stochastic depth act in training only and are
converted if both packages have them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kmodels.models.blocks.encoder_config import GELUS
from kmodels.models.blocks.keras_hub_mapping import KerasHubMapping, Settings, dense, norm, numbered
from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.weights.augreg import attention, patches
from kmodels.models.vit.weights.dinov2 import gated_dim, ratio_of
from kmodels.models.vit.weights.dinov3 import MOVES
from kmodels.models.vit.weights.huggingface_export import (
    BIAS,
    LOGITS,
    NONE,
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
DEIT_NAMES = ("dropout_rate", "attention_dropout", "layer_norm_epsilon", "use_mha_bias")
MAP = {"num_classes": 0, "pooling": "map"}


def _mapping(
    backbone: str,
    table: Callable[[ViTConfig], list[Rule]],
    # keras-hub's arguments to fields of the config, besides those of every ViT
    names: Mapping[str, str],
    # the results of `unusual`, and the pairs of pooling and head, that keras-hub supports
    can: set[str],
    heads: set[tuple[str | None, str]],
    # further settings, and whether keras-hub lacks them; those of keras-hub that are lacking here
    lacks: Callable[[ViTConfig, Settings], dict[str, bool]],
    strange: Callable[[Settings, Settings], dict[str, bool]] = lambda given, task: {},
    # keras-hub's arguments to further fields, and the reverse
    fields: Callable[[Settings], dict[str, Any]] = lambda given: {},
    arguments: Callable[[ViTConfig], dict[str, Any]] = lambda config: {},
    task: str | None = None,
    **more: Any,
) -> KerasHubMapping:
    """Returns the mapping of a kind of ViT; other arguments are as in `KerasHubMapping`."""
    names = {**_same("num_layers", "num_heads", "hidden_dim"), **names}

    def to_fields(given: Settings) -> dict[str, Any]:
        patch = given["patch_size"]
        return {
            **{ours: given[theirs] for theirs, ours in names.items()},
            "image_shape": tuple(given["image_shape"]),
            "patch_size": patch if isinstance(patch, int) else patch[0],
            **fields(given),
        }

    def to_arguments(config: ViTConfig) -> dict[str, Any]:
        own = {theirs: getattr(config, ours) for theirs, ours in names.items()}
        images = {"image_shape": config.image_shape, "patch_size": config.patch_size}
        return {**images, **own, **arguments(config)}

    def unsupported_in(given: Settings, task: Settings) -> list[str]:
        patch = given["patch_size"]
        oblong = not isinstance(patch, int) and patch[0] != patch[1]
        problems = {f"patches of {patch} pixels": oblong, **strange(given, task)}
        return [text for text, there in problems.items() if there]

    def unsupported_out(config: ViTConfig, settings: Settings) -> list[str]:
        own = [text for text, there in lacks(config, settings).items() if there]
        return [*lacking(config, settings, can, heads), *own]

    return KerasHubMapping(
        backbone=backbone,
        task=task,
        ours=ViTBackbone,
        our_task=ViTImageClassifier,
        table=table,
        fields=to_fields,
        arguments=to_arguments,
        unsupported_in=unsupported_in,
        unsupported_out=unsupported_out,
        **more,
    )


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


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


def _strange_gap(config: Settings, task: Settings) -> dict[str, bool]:
    # Its mean takes in every token, as ours does without a class token.
    mean = task.get("pooling") == "gap" and config.get("use_class_token", True)
    return {'pooling="gap" that takes in the class token': mean}


VIT = _mapping(
    "ViTBackbone",
    vit,
    _same("mlp_dim", *DEIT_NAMES, "use_mlp_bias", "use_class_token", "use_patch_bias"),
    can={BIAS, "use_class_token=False", "intermediate_dim", "a pooler", "an activation"},
    heads={("token", LOGITS), ("gap", LOGITS)},
    lacks=lambda config, settings: {
        **_gelu(config),
        'pooling="gap" beside a class token, which it takes in': (
            settings.get("pooling") == "gap" and config.use_class_token
        ),
    },
    strange=_strange_gap,
    task="ViTImageClassifier",
    settings=_settings,
    head=_head,
    belongs=lambda config, settings: True,
)
DEIT = _mapping(
    "DeiTBackbone",
    deit,
    _same(*DEIT_NAMES) | {"intermediate_dim": "mlp_dim"},
    can={BIAS, "a distillation token", "an activation"},
    heads={("token", LOGITS)},
    lacks=lambda config, settings: {**_gelu(config), **_biases(config)},
    strange=_strange_gap,
    fields=lambda given: {"use_distillation_token": True, "position_interpolation": "bicubic"},
    task="DeiTImageClassifier",
    settings=_settings,
    head=lambda settings: {k: v for k, v in _head(settings).items() if k != "intermediate_dim"},
    belongs=lambda config, settings: config.use_distillation_token,
)
DINOV2 = _mapping(
    "DINOV2Backbone",
    dinov2,
    _same("num_register_tokens", "use_mask_token", "use_swiglu_ffn", "dropout_rate")
    | _same("drop_path_rate")
    | {"layer_scale_init_value": "layer_scale"},
    can={BIAS, "layer_scale", "register tokens", "a mask token", "SwiGLU"},
    heads={(None, NONE)},
    lacks=lambda config, settings: {
        **_gelu(config),
        **_fixed(config),
        f"mlp_dim={config.mlp_dim} with SwiGLU": (
            config.use_swiglu_ffn and ratio_of(config) is None
        ),
        "a head (give model.backbone)": bool(settings),
    },
    fields=lambda given: {
        "mlp_dim": (
            gated_dim(given["intermediate_dim"], 1)
            if given["use_swiglu_ffn"]
            else given["intermediate_dim"]
        ),
        "attention_dropout": given["dropout_rate"],
        "position_interpolation": (
            "bicubic_antialias" if given["antialias_in_interpolation"] else "bicubic"
        ),
    },
    arguments=lambda config: {
        # Of SwiGLU the width of which the gate has two thirds.
        "intermediate_dim": (
            config.hidden_dim * (ratio_of(config) or 0) if config.use_swiglu_ffn else config.mlp_dim
        ),
        "position_embedding_shape": config.image_shape,
        "antialias_in_interpolation": config.position_interpolation == "bicubic_antialias",
    },
    belongs=lambda config, settings: config.layer_scale is not None,
    # The table that was trained, from which the one in use is made for the size of the images.
    copies={"embeddings/position_embeddings": "embeddings/interpolated_position_embeddings"},
)


def _strange_gate(given: Settings, task: Settings) -> dict[str, bool]:
    name, gated = given["hidden_activation"], given["use_gated_mlp"]
    odd = name != ("silu" if gated else "gelu")
    return {f"hidden_activation={name!r} with use_gated_mlp={gated}": odd}


DINOV3 = _mapping(
    "DINOV3Backbone",
    dinov3,
    _same("num_register_tokens", "use_mask_token", "attention_dropout", "drop_path_rate")
    | _same("use_query_bias", "use_key_bias", "use_value_bias", "use_proj_bias", "use_mlp_bias")
    | _same("rope_theta")
    | {"intermediate_dim": "mlp_dim", "layer_scale_init_value": "layer_scale"}
    | {"layer_norm_eps": "layer_norm_epsilon", "use_gated_mlp": "use_swiglu_ffn"},
    can={
        *(BIAS, UNBIASED, ROTARY, "layer_scale", "register tokens", "a mask token", "SwiGLU"),
        "use_position_embedding=False",
    },
    heads={(None, NONE)},
    lacks=lambda config, settings: {
        **_gelu(config),
        **{f"{name}={value}": bool(value) for name in MOVES for value in [getattr(config, name)]},
        "use_patch_bias=False": not config.use_patch_bias,
        "use_mha_bias=False": not config.use_mha_bias,
        f"dropout_rate={config.dropout_rate}": bool(config.dropout_rate),
        "a head (give model.backbone)": bool(settings),
    },
    strange=_strange_gate,
    fields=lambda given: {"use_position_embedding": False},
    arguments=lambda config: {"hidden_activation": "silu" if config.use_swiglu_ffn else "gelu"},
    belongs=lambda config, settings: config.rope_theta is not None,
)
SIGLIP = _mapping(
    "SigLIPVisionEncoder",
    siglip,
    _same("layer_norm_epsilon") | {"intermediate_dim": "mlp_dim"},
    can={BIAS, "use_class_token=False", "positions of native aspect ratio"},
    heads={("map", NONE)},
    lacks=lambda config, settings: {
        **_fixed(config),
        "a class token": config.use_class_token,
        f"dropout_rate={config.dropout_rate}": bool(config.dropout_rate),
        f"attention_dropout={config.attention_dropout}": bool(config.attention_dropout),
    },
    strange=lambda given, task: {
        f"intermediate_activation={given['intermediate_activation']!r}": (
            given["intermediate_activation"] not in GELUS
        )
    },
    fields=lambda given: {
        "use_class_token": False,
        "approximate_gelu": GELUS.get(given["intermediate_activation"], False),
        "position_interpolation": "bicubic",
    },
    arguments=lambda config: {
        "intermediate_activation": next(
            name for name, value in GELUS.items() if value == config.approximate_gelu
        ),
    },
    belongs=lambda config, settings: settings.get("pooling") == "map",
    pooled=MAP,
    inside={"SigLIPBackbone": "vision_encoder"},
    copies={"embedding/position_ids": None},
    renamed={r"head/variable(_\d+)?": "head/probe"},
)
PEERS = (DEIT, DINOV3, DINOV2, SIGLIP, VIT)
