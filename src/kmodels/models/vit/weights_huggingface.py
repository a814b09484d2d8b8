"""Hugging Face `ViTForImageClassification` and `ViTModel` directories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kmodels.errors import InputError
from kmodels.models.vit.config import ViTConfig
from kmodels.weights import Checkpoint, Rule, constant, patch_kernel, read_safetensors, transpose
from kmodels.weights.positions import fit_positions
from kmodels.weights.readers import read_json
from kmodels.weights.tensors import LazyArray

GELUS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
# Pillow's numbers, in which Hugging Face writes them.
INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
POSITIONS = "embeddings.position_embeddings"
BLOCK = "encoder.layer.{i}"


def rules(config: ViTConfig, prefix: str = "vit.") -> list[Rule]:
    """The table; `prefix` is "vit." in a classifier and empty in a bare `ViTModel`."""
    patch = patch_kernel(config.patch_size, config.image_shape[2])
    projection = "embeddings.patch_embeddings.projection"
    pairs = {
        f"{BLOCK}.attention.attention.query": "block_{i}/attention/query",
        f"{BLOCK}.attention.attention.key": "block_{i}/attention/key",
        f"{BLOCK}.attention.attention.value": "block_{i}/attention/value",
        f"{BLOCK}.attention.output.dense": "block_{i}/attention/output",
        f"{BLOCK}.intermediate.dense": "block_{i}/mlp/up",
        f"{BLOCK}.output.dense": "block_{i}/mlp/down",
        "pooler.dense": "pre_logits",
    }
    norms = {
        f"{BLOCK}.layernorm_before": "block_{i}/attention_norm",
        f"{BLOCK}.layernorm_after": "block_{i}/mlp_norm",
        "layernorm": "final_norm",
    }
    table = [
        Rule("embeddings.cls_token", "tokens/class_token"),
        Rule(POSITIONS, "tokens/position_embedding"),
        Rule(f"{projection}.weight", "patch_embedding/kernel", patch),
        Rule(f"{projection}.bias", "patch_embedding/bias"),
    ]
    for source, target in pairs.items():
        table.append(Rule(f"{source}.weight", f"{target}/kernel", transpose))
        table.append(Rule(f"{source}.bias", f"{target}/bias"))
    for source, target in norms.items():
        table.append(Rule(f"{source}.weight", f"{target}/scale"))
        table.append(Rule(f"{source}.bias", f"{target}/bias"))
    table = [Rule(prefix + rule.source, rule.target, rule.transform) for rule in table]
    return [
        *table,
        Rule("classifier.weight", "logits/kernel", transpose),
        Rule("classifier.bias", "logits/bias"),
    ]


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Whether a directory with this config.json is of this format."""
    return path.is_dir() and description.get("model_type") == "vit"


def open_checkpoint(
    path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
) -> Checkpoint:
    """Understands a directory.

    Args:
        path: of the directory.
        description: the object in its config.json.
        given: unused; the file says it all.
        weights: False where only the architecture is wanted and no tensors need be there.

    Raises:
        InputError: for settings that the model has no counterpart for.
    """
    backbone = _backbone(path, description)
    config = ViTConfig(**backbone)
    tensors = read_safetensors(path) if weights else {}
    prefix = "vit." if any(name.startswith("vit.") for name in tensors) else ""
    tensors = _with_zero_biases(tensors, prefix, config)
    pooler = tensors.get(f"{prefix}pooler.dense.weight")
    if pooler is not None and description.get("pooler_act", "tanh") != "tanh":
        raise InputError(f"{path}: pooler_act is {description['pooler_act']!r}; only tanh is known")
    head = tensors.get("classifier.weight")
    task = {
        "pooling": "token",
        "intermediate_dim": pooler.shape[0] if pooler is not None else None,
        "num_classes": head.shape[0] if head is not None else _labels(description, weights),
    }

    def fit(held: Any, wanted: ViTConfig) -> Any:
        name = prefix + POSITIONS
        if name not in held:
            return held
        table = fit_positions(held[name], config.grid, wanted.grid, 1, "bicubic")
        return {**held, name: table}

    return Checkpoint(
        path=path,
        kind="Hugging Face",
        backbone=backbone,
        task=task,
        preprocessor=_preprocessor(path, config),
        tensors=tensors,
        rules=rules(config, prefix),
        fit=fit,
    )


def _labels(description: dict[str, Any], weights: bool) -> int | None:
    if weights or "ViTForImageClassification" not in (description.get("architectures") or ()):
        return None
    labels = description.get("id2label")
    return len(labels) if labels else int(description.get("num_labels", 2))


def _with_zero_biases(
    tensors: dict[str, LazyArray], prefix: str, config: ViTConfig
) -> dict[str, LazyArray]:
    """Adds the biases that `qkv_bias=False` leaves out: the output projection keeps its own."""
    found = dict(tensors)
    for i in range(config.num_layers):
        for part in ("query", "key", "value"):
            name = f"{prefix}{BLOCK.format(i=i)}.attention.attention.{part}"
            if f"{name}.weight" in tensors and f"{name}.bias" not in tensors:
                found[f"{name}.bias"] = constant(0.0, (config.hidden_dim,))
    return found


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[1])) if isinstance(value, Sequence) else (value, value)


def _backbone(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    # The defaults are those of transformers' ViTConfig, which leaves out what equals them.
    get = description.get
    activation = get("hidden_act", "gelu")
    if activation not in GELUS:
        raise InputError(
            f"{path}: hidden_act is {activation!r}; the model knows {', '.join(GELUS)}"
        )
    patch = _pair(get("patch_size", 16))
    if patch[0] != patch[1]:
        raise InputError(f"{path}: patches of {patch} pixels; only square ones are known")
    return {
        "image_shape": (*_pair(get("image_size", 224)), int(get("num_channels", 3))),
        "patch_size": patch[0],
        "num_layers": get("num_hidden_layers", 12),
        "num_heads": get("num_attention_heads", 12),
        "hidden_dim": get("hidden_size", 768),
        "mlp_dim": get("intermediate_size", 3072),
        "dropout_rate": get("hidden_dropout_prob", 0.0),
        "attention_dropout": get("attention_probs_dropout_prob", 0.0),
        "layer_norm_epsilon": get("layer_norm_eps", 1e-12),
        "approximate_gelu": GELUS[activation],
    }


def _preprocessor(path: Path, config: ViTConfig) -> dict[str, Any]:
    channels = config.image_shape[2]
    found: dict[str, Any] = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    file = path / "preprocessor_config.json"
    held = read_json(file) if file.is_file() else {}
    if held.get("do_normalize", True):
        for name, key in (("mean", "image_mean"), ("std", "image_std")):
            if len(held.get(key) or ()) == channels:
                found[name] = tuple(held[key])
    else:
        found = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    found["interpolation"] = INTERPOLATION.get(held.get("resample", 2), "bilinear")
    return {**found, "image_size": config.image_shape[:2]}
