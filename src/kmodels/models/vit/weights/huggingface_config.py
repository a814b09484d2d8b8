"""Shared parts of the Hugging Face formats: their JSON files, and biases that they leave out."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.common.encoder import rules as encoder_rules
from kmodels.models.vit.config import ViTConfig
from kmodels.weights import LazyArray, Rule, constant
from kmodels.weights.readers import read_json

# Pillow's numbers, in which Hugging Face writes them.
INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# What transformers 5 calls parts of an attention; it writes the older names unless it is told
# `save_original_format=False`.
NEWER_ATTENTION: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\.attention\.([qkv])_proj\.": lambda m: f".attention.attention.{QUERY_KEY_VALUE[m[1]]}.",
    r"\.attention\.o_proj\.": ".attention.output.dense.",
}
QUERY_KEY_VALUE = {"q": "query", "k": "key", "v": "value"}
# The same of the blocks of ViT, DeiT, I-JEPA and MAE. Those of MAE's decoder are called
# `decoder_layers` in published files, and `decoder_encoder.layer` where transformers 5 writes them.
NEWER_BLOCKS: dict[str, str | Callable[[re.Match[str]], str]] = {
    **NEWER_ATTENTION,
    r"(^|\.|_)layers\.": r"\1encoder.layer.",
    r"\.mlp\.fc1\.": ".intermediate.dense.",
    r"\.mlp\.fc2\.": ".output.dense.",
}


def backbone_fields(path: Path, description: Mapping[str, Any], patch: int = 16) -> dict[str, Any]:
    """Fields of the config that all formats have; what equals a default may be left out.

    Args:
        path: path of the directory, for messages.
        description: the object in config.json, or its part about the images.
        patch: the patch size where it is left out.

    Raises:
        InputError: for an activation or patches that the model has no counterpart for.
    """
    get = description.get
    patches = _pair(get("patch_size", patch))
    if patches[0] != patches[1]:
        raise InputError(f"{path}: patches of {patches} pixels; only square ones are supported")
    side = patches[0]
    # The convolution passes over what is left of an image beside its last whole patch.
    height, width = (pixels // side * side for pixels in _pair(get("image_size", 224)))
    return {
        "image_shape": (height, width, int(get("num_channels", 3))),
        "patch_size": side,
        "num_layers": get("num_hidden_layers", 12),
        "num_heads": get("num_attention_heads", 12),
        "hidden_dim": get("hidden_size", 768),
        "mlp_dim": get("intermediate_size", 3072),
        "dropout_rate": get("hidden_dropout_prob", 0.0),
        "attention_dropout": get("attention_probs_dropout_prob", get("attention_dropout", 0.0)),
        "position_interpolation": "bicubic",
        "approximate_gelu": encoder_rules.approximate_gelu(path, get("hidden_act", "gelu")),
    }


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[1])) if isinstance(value, Sequence) else (value, value)


def preprocessor(path: Path, config: ViTConfig) -> dict[str, Any] | None:
    """Returns the preprocessor's arguments that a directory describes, or None.

    An image processor is saved as preprocessor_config.json, and one that was saved together with
    a tokenizer as a part of processor_config.json.
    """
    held = _image_processor(path)
    if held is None:
        return None
    channels = config.image_shape[2]
    found: dict[str, Any] = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    if held.get("do_normalize", True):
        for name, key in (("mean", "image_mean"), ("std", "image_std")):
            if len(held.get(key) or ()) == channels:
                found[name] = tuple(held[key])
    else:
        found = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    found["interpolation"] = INTERPOLATION.get(held.get("resample", 2), "bilinear")
    if "max_num_patches" in held:
        found["max_num_patches"] = held["max_num_patches"]
    for key, way in (("do_pad", "pad"), ("do_split_image", "split")):
        if held.get(key) and _kind(held).startswith("EomtImageProcessor"):
            found["aspect_ratio"] = way
    return {**found, "image_size": config.image_shape[:2]}


def crops_middle(path: Path) -> bool:
    """Returns whether a directory's image processor takes the middle of an image, as CLIP's."""
    held = _image_processor(path) or {}
    return bool(held.get("do_center_crop")) and "shortest_edge" in (held.get("size") or ())


def takes_patches(path: Path) -> bool:
    """Returns whether a directory's image processor keeps aspect ratios, as SigLIP 2's."""
    held = _image_processor(path) or {}
    return _kind(held).startswith("Siglip2ImageProcessor")


def _kind(held: Mapping[str, Any]) -> str:
    return str(held.get("image_processor_type", ""))


def _image_processor(path: Path) -> dict[str, Any] | None:
    if (alone := path / "preprocessor_config.json").is_file():
        return read_json(alone)
    together = path / "processor_config.json"
    return read_json(together).get("image_processor") if together.is_file() else None


def labels(description: Mapping[str, Any], weights: bool, ending: str) -> int | None:
    """Classes of an architecture whose name ends so, where there are not weights that tell."""
    named = any(name.endswith(ending) for name in description.get("architectures") or ())
    if weights or not named:
        return None
    given = description.get("id2label")
    return len(given) if given else int(description.get("num_labels", 2))


def block_rules(source: str, target: str) -> list[Rule]:
    """Returns the table of the blocks of ViT, DeiT, I-JEPA and MAE.

    Args:
        source: what a block is called in the file, with "{i}" for its number.
        target: what it is called here.
    """
    layers = {
        "attention.attention.query": "attention/query",
        "attention.attention.key": "attention/key",
        "attention.attention.value": "attention/value",
        "attention.output.dense": "attention/output",
        "intermediate.dense": "mlp/up",
        "output.dense": "mlp/down",
    }
    norms = {"layernorm_before": "attention_norm", "layernorm_after": "mlp_norm"}
    return [
        *encoder_rules.dense({f"{source}.{x}": f"{target}/{ours}" for x, ours in layers.items()}),
        *encoder_rules.norms({f"{source}.{x}": f"{target}/{ours}" for x, ours in norms.items()}),
    ]


def by_older_names(
    tensors: Mapping[str, LazyArray], newer: Mapping[str, str | Callable[[re.Match[str]], str]]
) -> dict[str, LazyArray]:
    """Returns tensors by the names that transformers had before its version 5.

    Args:
        tensors: those of a file.
        newer: patterns of its newer names, and what each was.
    """
    found = {}
    for name, tensor in tensors.items():
        for pattern, older in newer.items():
            name = re.sub(pattern, older, name)
        found[name] = tensor
    return found


def with_zero_biases(
    tensors: Mapping[str, LazyArray], layers: Iterable[str], width: int
) -> dict[str, LazyArray]:
    """Adds the biases that `qkv_bias=False` leaves out: the output projection keeps its own."""
    found = dict(tensors)
    for name in layers:
        if f"{name}.weight" in tensors and f"{name}.bias" not in tensors:
            found[f"{name}.bias"] = constant(0.0, (width,))
    return found
