"""A ViT as transformers writes it: which of its models that is, config.json, and the table."""

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.blocks.encoder_rules import HIDDEN_ACTS
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import clip_siglip, dinov2, dinov3, eomt, huggingface
from kmodels.models.vit.weights.huggingface_config import picture_form
from kmodels.weights import LazyArray, Rule, constant, prepend_zeros

log = logging.getLogger("kmodels")
Settings = Mapping[str, Any]
BIAS, UNBIASED = "a bias of the patches", "biases of some projections of the attention alone"
ROTARY = "a rotary embedding"
# Rates in training, and their names in a config.json; not every model of transformers has them.
RATES: dict[str, tuple[str, ...]] = {
    "dropout_rate": ("hidden_dropout_prob",),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "drop_path_rate": ("drop_path_rate",),
    "patch_drop_rate": (),
}
NONE, LOGITS, PROJECTION = "no head", "logits", "logits without bias"


def lacking(
    config: ViTConfig, settings: Settings, known: Set[str], heads: Set[tuple[str | None, str]]
) -> list[str]:
    """Returns the settings of a model that another package's cannot express.

    It supports the `known` results of `unusual`, and these pairs of pooling and head.
    """
    problems = [name for name in unusual(config, settings) if name not in known]
    pooling, last = settings.get("pooling"), head(settings)
    if (pooling, last) in heads or not settings:
        return problems
    if "pooling" not in settings:
        return [*problems, "the head of this task; export the backbone"]
    pooled = pooling in {known for known, _ in heads}
    return [*problems, f"{last} over pooling={pooling!r}" if pooled else f"pooling={pooling!r}"]


def unusual(config: ViTConfig, settings: Settings) -> list[str]:
    """Returns the settings in which a model differs from the original ViT."""
    native = config.position_interpolation == "bilinear_antialias"
    unlike_vit = {
        "use_class_token=False": not config.use_class_token,
        "a distillation token": config.use_distillation_token,
        "register tokens": bool(config.num_register_tokens),
        "a mask token": config.use_mask_token,
        "position_over_prefix=False": (
            config.use_class_token
            and config.use_position_embedding
            and not config.position_over_prefix
        ),
        "use_position_embedding=False": not config.use_position_embedding,
        ROTARY: config.rope_theta is not None and config.rope_type == "dinov3",
        f"rope_type={config.rope_type!r}": config.rope_theta is not None
        and config.rope_type != "dinov3",
        UNBIASED: config.use_mha_bias and bool(config.unbiased),
        "an attention pooling of its own sizes": settings.get("pooling") == "map"
        and (
            config.pool_include_prefix
            or config.pooling_num_heads not in (None, config.num_heads)
            or config.pooling_mlp_dim not in (None, config.mlp_dim)
        ),
        "positions of native aspect ratio": native and not config.use_class_token,
        f"token_merging={config.token_merging}": bool(config.token_merging),
        "layer_scale": config.layer_scale is not None,
        "qk_norm": config.qk_norm,
        "pre_norm": config.pre_norm,
        BIAS: config.use_patch_bias,
        "SwiGLU": config.use_swiglu_ffn,
        "final_norm=False": not config.final_norm,
        "pooled_norm": bool(settings.get("pooled_norm")),
        "intermediate_dim": _pooler(config, settings) is False,
        "a pooler": _pooler(config, settings) is True,
        "an activation": settings.get("activation") not in (None, "linear"),
    }
    return [name for name, there in unlike_vit.items() if there]


def _pooler(config: ViTConfig, settings: Settings) -> bool | None:
    """Returns True for the pooler of a bare model, False for other pre-logits, None for none."""
    if (dim := settings.get("intermediate_dim")) is None:
        return None
    return not settings["num_classes"] and dim == config.hidden_dim


def head(settings: Settings) -> str:
    """Returns which of `NONE`, `LOGITS` and `PROJECTION` a task has."""
    if not settings.get("num_classes"):
        return NONE
    return LOGITS if settings.get("head_bias", True) else PROJECTION


@dataclass(frozen=True)
class Form:
    """A model of transformers.

    Args:
        name: for messages.
        needs: results of `unusual` that this model always has.
        can: results of `unusual` that it may have.
        heads: the pairs of pooling and head that it supports.
        describe: function of (config, settings) to the fields of config.json of this model only.
        table: function of (config, settings) to the rules.
        unbiased: parts that may have no bias; others get a bias of zeros.
        only: further condition, to tell similar models of transformers apart.
        setting: a setting that only this task has; None for none.
    """

    name: str
    needs: frozenset[str]
    can: frozenset[str]
    heads: frozenset[tuple[str | None, str]]
    describe: Callable[[ViTConfig, Settings], dict[str, Any]]
    table: Callable[[ViTConfig, Settings], list[Rule]]
    unbiased: frozenset[str] = frozenset()
    only: Callable[[ViTConfig], bool] = lambda config: True
    setting: str | None = None

    def unsupported_out(self, config: ViTConfig, settings: Settings) -> list[str]:
        """Returns the settings that this model cannot express."""
        return lacking(config, settings, self.needs | self.can, self.heads)

    def suits(self, config: ViTConfig, settings: Settings) -> bool:
        """Returns True if transformers' model is this one."""
        return (
            (self.setting is None or self.setting in settings)
            and self.only(config)
            and self.needs.issubset(unusual(config, settings))
            and not self.unsupported_out(config, settings)
        )


def transformers_form(
    model: keras.Model,
) -> tuple[dict[str, Any], dict[str, Any], list[Rule], dict]:
    """Returns a ViT as transformers writes it.

    Returns:
        config.json, preprocessor_config.json, the table, and tensors of zeros for missing biases or
        mask token.

    Raises:
        InputError: lists the settings that transformers' ViT cannot express.
    """
    backbone = getattr(model, "backbone", model)
    config, settings = backbone.config, getattr(model, "settings", {})
    if "pooling/" in backbone.own_parts and model is backbone:
        settings = {"pooling": "map", "num_classes": 0}  # a tower that pools without a task
    form = next((form for form in FORMS if form.suits(config, settings)), None)
    if form is None:
        nearest = MAE if "mask_ratio" in settings else VIT
        if eomt.SETTING in settings:
            nearest = EOMT_DINOV3 if config.rope_theta is not None else EOMT
        lacking = nearest.unsupported_out(config, settings) or [
            "images that are not square"
            if config.grid[0] != config.grid[1]
            else "positions of the class token; give position_over_prefix=False"
        ]
        problems = ", ".join(lacking)
        raise InputError(f"transformers' ViT has no counterpart for {problems}")
    height, width, channels = config.image_shape
    described: dict[str, Any] = {
        "hidden_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": HIDDEN_ACTS[config.approximate_gelu],
        "layer_norm_eps": config.layer_norm_epsilon,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": channels,
        **form.describe(config, settings),
    }
    rates = {name: getattr(config, name) for name in RATES} | {"dropout": settings.get("dropout")}
    lost = [
        f"{name}={rate}"
        for name, rate in rates.items()
        if rate and described.keys().isdisjoint(RATES.get(name, ()))
    ]
    if lost:
        log.warning(
            "transformers' %s has no %s; the exported model is trained without",
            form.name,
            ", ".join(lost),
        )
    if head(settings) == LOGITS:
        classes = settings.get("class_names")
        classes = classes or [f"LABEL_{i}" for i in range(settings["num_classes"])]
        names = {str(i): name for i, name in enumerate(classes)}
        described |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
        if problem := settings.get("problem_type"):
            described["problem_type"] = problem
    table = form.table(config, settings)
    if form.name in TOWERS and head(settings) == LOGITS:
        described = _nested(described)
    pictures = picture_form(getattr(model, "preprocessor", None))
    more = _zeros(form, config, table)
    if form.setting == eomt.SETTING:
        more |= eomt.more_tensors(config, settings)
    return described, pictures, table, more


def _plain(kind: str, name: str, config: ViTConfig, settings: Settings) -> dict[str, Any]:
    ending = "Model" if head(settings) == NONE else "ForImageClassification"
    if settings.get("pooling") == "distilled":
        ending += "WithTeacher"
    return {
        "architectures": [f"{name}{ending}"],
        "model_type": kind,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout,
        "qkv_bias": True,
    }


def _plain_table(kind: str, config: ViTConfig, settings: Settings) -> list[Rule]:
    prefix = f"{kind}." if head(settings) != NONE else ""
    distilled = settings.get("pooling") == "distilled"
    name = prefix + huggingface.POSITIONS
    return _padded(config, name, huggingface.rules(config, prefix, distilled))


def _mae(config: ViTConfig, settings: Settings) -> dict[str, Any]:
    return {
        **_plain(huggingface.MAE, "ViTMAE", config, settings),
        "architectures": ["ViTMAEForPreTraining"],
        **{name: settings[name] for name in huggingface.DECODER_SETTINGS},
    }


def _mae_table(config: ViTConfig, settings: Settings) -> list[Rule]:
    encoder = huggingface.rules(config, "vit.")
    table = _padded(config, f"vit.{huggingface.POSITIONS}", encoder)
    return [*table, *huggingface.decoder_rules()]


def _padded(config: ViTConfig, name: str, table: list[Rule]) -> list[Rule]:
    """Zeros in front of positions that no class token has."""
    if config.position_over_prefix:
        return table
    padded = Rule(name, "tokens/position_embedding", prepend_zeros(config.num_special_tokens))
    return [padded if rule.source == name else rule for rule in table]


def _dinov2(config: ViTConfig, settings: Settings) -> dict[str, Any]:
    registers = config.num_register_tokens
    name = "Dinov2WithRegisters" if registers else "Dinov2"
    ending = "Model" if head(settings) == NONE else "ForImageClassification"
    more = {"num_register_tokens": registers} if registers else {}
    return {
        "architectures": [f"{name}{ending}"],
        "model_type": dinov2.KINDS[bool(registers)],
        "mlp_ratio": _ratio(config),
        "layerscale_value": config.layer_scale,
        "use_swiglu_ffn": config.use_swiglu_ffn,
        "use_mask_token": config.use_mask_token,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout,
        "drop_path_rate": config.drop_path_rate,
        "qkv_bias": True,
        **more,
    }


def _ratio(config: ViTConfig) -> int:
    if (ratio := dinov2.ratio_of(config)) is None:
        raise InputError(
            f"transformers' DINOv2 has MLPs of whole multiples of the width {config.hidden_dim}; "
            f"mlp_dim is {config.mlp_dim}"
        )
    return ratio


def _dinov2_table(config: ViTConfig, settings: Settings) -> list[Rule]:
    kind = dinov2.KINDS[bool(config.num_register_tokens)]
    prefix = "" if head(settings) == NONE else f"{kind}."
    name = prefix + dinov2.POSITIONS
    return _padded(config, name, dinov2.rules(config, prefix))


def _dinov3(config: ViTConfig, settings: Settings) -> dict[str, Any]:
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": dinov3.KIND,
        "attention_dropout": config.attention_dropout,
        "drop_path_rate": config.drop_path_rate,
        "layerscale_value": config.layer_scale,
        "num_register_tokens": config.num_register_tokens,
        "use_gated_mlp": config.use_swiglu_ffn,
        **({"hidden_act": "silu"} if config.use_swiglu_ffn else {}),
        **_turning(config),
    }


def _turning(config: ViTConfig) -> dict[str, Any]:
    """Returns the rotary embedding of DINOv3, its draws and the biases."""
    biases = {name: getattr(config, ours) for ours, name in dinov3.BIASES.items()}
    for name in ("query_bias", "key_bias", "value_bias", "proj_bias"):
        biases[name] = biases[name] and config.use_mha_bias
    moves = {name: getattr(config, name) for name in dinov3.MOVES}
    return {"rope_theta": config.rope_theta, **biases, **moves}


def _eomt(config: ViTConfig, settings: Settings) -> dict[str, Any]:
    gated = config.use_swiglu_ffn
    own = {**_turning(config), "use_gated_mlp": gated, **({"hidden_act": "silu"} if gated else {})}
    if (theta := own.pop("rope_theta")) is not None:
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    else:
        own = {"mlp_ratio": _ratio(config), "use_swiglu_ffn": gated}
    return {**eomt.describe(config, settings), **own}


def _tower(name: str, config: ViTConfig, settings: Settings) -> dict[str, Any]:
    """Returns config.json of a vision tower; one with a classifier becomes a part by `_nested`."""
    endings = {
        NONE: "VisionModel",
        LOGITS: "ForImageClassification",
        PROJECTION: "VisionModelWithProjection",
    }
    form: dict[str, Any] = {
        "architectures": [name + endings[head(settings)]],
        "model_type": f"{name.lower()}_vision_model",
        "attention_dropout": config.attention_dropout,
    }
    if head(settings) == PROJECTION:
        form["projection_dim"] = settings["num_classes"]
    if name != "CLIP":
        form["vision_use_head"] = settings.get("pooling") == "map"
    if name == "Siglip2":
        form["num_patches"] = config.grid[0] * config.grid[1]
    return form


def _tower_table(flat: bool, config: ViTConfig, settings: Settings) -> list[Rule]:
    last = head(settings)
    prefix = "" if last == NONE else clip_siglip.PREFIX
    return clip_siglip.rules(config, prefix, last == PROJECTION, flat)


def _nested(described: dict[str, Any]) -> dict[str, Any]:
    """Returns a description nested as a part, as classifiers of transformers have it."""
    outside = ("architectures", "id2label", "label2id", "problem_type")
    inside = {key: value for key, value in described.items() if key not in outside}
    kind = described["model_type"].removesuffix("_vision_model")
    whole = {key: described[key] for key in outside if key in described}
    return {**whole, "model_type": kind, "vision_config": inside}


VIT = Form(
    "ViT",
    frozenset(),
    frozenset({BIAS, UNBIASED, "position_over_prefix=False", "a pooler"}),
    frozenset({("token", NONE), ("token", LOGITS)}),
    partial(_plain, "vit", "ViT"),
    partial(_plain_table, "vit"),
)
DINO = ("register tokens", "a mask token", "SwiGLU")
DEIT = Form(
    "DeiT",
    frozenset({"a distillation token"}),
    VIT.can,
    VIT.heads | {("distilled", LOGITS)},
    partial(_plain, "deit", "DeiT"),
    partial(_plain_table, "deit"),
)
DINOV2 = Form(
    "DINOv2",
    frozenset({"layer_scale"}),
    frozenset({BIAS, UNBIASED, "position_over_prefix=False", *DINO}),
    frozenset({("token", NONE), ("token_gap", LOGITS)}),
    _dinov2,
    _dinov2_table,
)
DINOV3 = Form(
    "DINOv3",
    frozenset({"layer_scale", ROTARY, "use_position_embedding=False"}),
    frozenset({BIAS, UNBIASED, *DINO}),
    frozenset({("token", NONE)}),
    _dinov3,
    lambda config, settings: dinov3.rules(config),
    unbiased=frozenset({"attention/", "mlp/"}),
)
CLIP = Form(
    "CLIP",
    frozenset({"pre_norm"}),
    frozenset({UNBIASED}),
    frozenset({("token", NONE), ("token", PROJECTION)}),
    partial(_tower, "CLIP"),
    partial(_tower_table, False),
)
IJEPA = Form(
    "I-JEPA",
    frozenset({"use_class_token=False"}),
    frozenset({BIAS, UNBIASED}),
    frozenset({("gap", NONE), ("gap", LOGITS)}),
    partial(_plain, "ijepa", "IJepa"),
    partial(_plain_table, "ijepa"),
    only=huggingface.is_ijepa,
)
SIGLIP = Form(
    "SigLIP",
    frozenset({"use_class_token=False"}),
    frozenset({BIAS, UNBIASED}),
    frozenset({("map", NONE), ("gap", NONE), ("gap", LOGITS)}),
    partial(_tower, "Siglip"),
    partial(_tower_table, False),
)
SIGLIP2 = Form(
    "SigLIP 2",
    SIGLIP.needs | {"positions of native aspect ratio"},
    SIGLIP.can,
    SIGLIP.heads,
    partial(_tower, "Siglip2"),
    partial(_tower_table, True),
)
MAE = Form(
    "MAE",
    frozenset(),
    frozenset({BIAS, UNBIASED, "position_over_prefix=False"}),
    frozenset({(None, NONE)}),
    _mae,
    _mae_table,
    only=lambda config: config.grid[0] == config.grid[1],
)
EOMT = Form(
    "EoMT",
    frozenset({"layer_scale"}),
    frozenset({BIAS, UNBIASED, "position_over_prefix=False", "register tokens", "SwiGLU"}),
    frozenset({(None, LOGITS)}),
    _eomt,
    lambda config, settings: eomt.rules(config),
    only=lambda config: config.grid[0] == config.grid[1] and not config.num_special_positions,
    setting=eomt.SETTING,
)
EOMT_DINOV3 = Form(
    "EoMT on DINOv3",
    DINOV3.needs,
    frozenset({BIAS, UNBIASED, "register tokens", "SwiGLU"}),
    EOMT.heads,
    _eomt,
    EOMT.table,
    unbiased=DINOV3.unbiased,
    only=EOMT.only,
    setting=eomt.SETTING,
)
TOWERS = ("CLIP", "SigLIP", "SigLIP 2")
FORMS = (VIT, DEIT, DINOV2, DINOV3, CLIP, IJEPA, SIGLIP, SIGLIP2, MAE, EOMT, EOMT_DINOV3)


def _zeros(form: Form, config: ViTConfig, table: list[Rule]) -> dict[str, LazyArray]:
    """Returns tensors that the format has and the model lacks."""
    width = config.hidden_dim
    absent = {
        "patch_embedding/": (config.use_patch_bias or BIAS not in form.can, width),
        **{
            f"attention/{part}": (config.use_mha_bias and part not in config.unbiased, width)
            for part in ("query", "key", "value", "output")
        },
        "mlp/gate": (config.use_mlp_bias, config.mlp_dim),
        "mlp/up": (config.use_mlp_bias, config.mlp_dim),
        "mlp/down": (config.use_mlp_bias, width),
    }
    zeros = {}
    for rule in table:
        target = rule.targets[0]
        if target.startswith("decoder/"):
            continue  # has all of its biases
        if target == "tokens/mask_token" and not config.use_mask_token:
            zeros[rule.source] = constant(0.0, (1, width) if form is DINOV2 else (1, 1, width))
        if target == "tokens/register_tokens" and form is DINOV3 and not config.num_register_tokens:
            zeros[rule.source] = constant(0.0, (1, 0, width))
        for part, (there, size) in absent.items():
            if part.startswith(tuple(form.unbiased)):
                continue
            if not there and part in target and target.endswith("/bias"):
                for i in range(config.num_layers if "{i}" in rule.source else 1):
                    zeros[rule.source.replace("{i}", str(i))] = constant(
                        0.0, (size * len(rule.targets),)
                    )
    return zeros
