"""What the loaders need to know about the family, in one place."""

from typing import Any

from kmodels.errors import InputError
from kmodels.models.registry import Family
from kmodels.models.vit import weights_augreg, weights_huggingface, weights_timm
from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.presets import PRESETS
from kmodels.training.footprint import Sizes
from kmodels.weights import Rule, constant, prepend_zeros
from kmodels.weights.positions import fit_positions


def _defaults(config: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Settings of a classifier that nobody gave: ImageNet's classes, a pooling that exists."""
    pooling = "token" if config.use_class_token else "gap"
    return {"num_classes": 1000, "pooling": pooling, **task}


def _fit_preprocessor(settings: dict[str, Any], config: Any) -> dict[str, Any]:
    return {**settings, "image_size": config.image_shape[:2]}


def _fit(tensors: Any, held: Any, wanted: Any) -> Any:
    """Our own files are resized as timm does, with antialiasing."""
    name = "tokens/position_embedding"
    rows = int(held.use_class_token and held.position_over_prefix)
    table = fit_positions(tensors[name], held.grid, wanted.grid, rows, "bicubic_antialias")
    return {**tensors, name: table}


def _no_counterpart(config: Any, settings: dict[str, Any]) -> list[str]:
    absent = {
        "use_class_token=False": not config.use_class_token,
        "register tokens": bool(config.num_register_tokens),
        "layer_scale": config.layer_scale is not None,
        "qk_norm": config.qk_norm,
        "pre_norm": config.pre_norm,
        "final_norm=False": not config.final_norm,
        "pooled_norm": settings.get("pooled_norm"),
        "intermediate_dim": settings.get("intermediate_dim"),
        "an activation": settings.get("activation") not in (None, "linear"),
        f"pooling={settings.get('pooling')!r}": settings.get("pooling", "token") != "token",
    }
    return [name for name, there in absent.items() if there]


def transformers_form(model: Any) -> tuple[dict[str, Any], dict[str, Any], list[Rule], dict]:
    """A ViT as transformers writes it.

    Args:
        model: a backbone or classifier.

    Returns:
        config.json, preprocessor_config.json, the table, and the tensors of zeros that the format
        needs where the model has no bias.

    Raises:
        InputError: lists everything that transformers' ViT cannot express.
    """
    backbone = getattr(model, "backbone", model)
    config, settings = backbone.config, getattr(model, "settings", {})
    if problems := _no_counterpart(config, settings):
        raise InputError(f"transformers' ViT has no counterpart for {', '.join(problems)}")
    height, width, channels = config.image_shape
    form: dict[str, Any] = {
        "architectures": ["ViTForImageClassification" if settings else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "gelu_pytorch_tanh" if config.approximate_gelu else "gelu",
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.layer_norm_epsilon,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": channels,
        "qkv_bias": True,
    }
    if settings:
        names = {str(i): f"LABEL_{i}" for i in range(settings["num_classes"])}
        form |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    prefix = "vit." if settings else ""
    table = weights_huggingface.rules(config, prefix)
    if not config.position_over_prefix:
        name = prefix + weights_huggingface.POSITIONS
        padded = Rule(name, "tokens/position_embedding", prepend_zeros(1))
        table = [padded if rule.source == name else rule for rule in table]
    return form, _picture_form(model, config), table, _zeros(config, table)


def _picture_form(model: Any, config: Any) -> dict[str, Any]:
    preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is None:
        return {}
    numbers = {name: number for number, name in weights_huggingface.INTERPOLATION.items()}
    height, width = preprocessor.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "size": {"height": height, "width": width},
        "resample": numbers[preprocessor.interpolation],
        "image_mean": list(preprocessor.mean),
        "image_std": list(preprocessor.std),
    }


def _zeros(config: Any, table: list[Rule]) -> dict[str, Any]:
    absent = {
        "patch_embedding/bias": (config.use_patch_bias, config.hidden_dim),
        "attention/": (config.use_mha_bias, config.hidden_dim),
        "mlp/up": (config.use_mlp_bias, config.mlp_dim),
        "mlp/down": (config.use_mlp_bias, config.hidden_dim),
    }
    found = {}
    for rule in table:
        target = rule.targets[0]
        for part, (there, size) in absent.items():
            if not there and part in target and target.endswith("/bias"):
                for i in range(config.num_layers if "{i}" in rule.source else 1):
                    found[rule.source.replace("{i}", str(i))] = constant(0.0, (size,))
    return found


def sizes(config: ViTConfig) -> Sizes:
    """What decides the memory of a step."""
    height, width = config.grid
    return Sizes(
        layers=config.num_layers,
        width=config.hidden_dim,
        heads=config.num_heads,
        groups=config.num_heads,
        head_dim=config.hidden_dim // config.num_heads,
        mlp_dim=config.mlp_dim,
        tokens=height * width + config.num_prefix_tokens,
        head_norms=config.qk_norm,
        dropout=config.dropout_rate,
        attention_dropout=config.attention_dropout,
    )


FAMILY = Family(
    name="vit",
    backbone=ViTBackbone,
    tasks=(ViTImageClassifier,),
    presets=PRESETS,
    formats=(weights_huggingface, weights_timm, weights_augreg),
    # What a setting of the task decides, so that a changed one leaves these weights new.
    parts={
        "num_classes": ("logits/",),
        "pooling": ("pooling/",),
        "pooled_norm": ("pooled_norm/",),
        "intermediate_dim": ("pre_logits/", "logits/"),
    },
    defaults=_defaults,
    fit_preprocessor=_fit_preprocessor,
    fit=_fit,
    sizes=sizes,
    transformers_form=transformers_form,
)
