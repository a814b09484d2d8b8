"""Shared parts of the Hugging Face formats: their JSON files, and biases that they leave out."""

import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.schema import read_json, read_optional
from kmodels.models.blocks import encoder_rules
from kmodels.models.blocks.directories import EncoderDirectory
from kmodels.models.vit.config import CLIP, HALF, IMAGENET, ViTConfig
from kmodels.models.vit.weights.resizing import fitting
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, constant

# The arguments of preprocessors that the warning names.
DECISIVE = ("image_size", "patch_size", "max_num_patches", "mean", "std")


def preprocessing(path: Path, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of a `Checkpoint` that concern images.

    If the checkpoint describes no arguments, a warning says so when a model is made from it.
    """

    def warn(kind: type) -> None:
        if arguments is None:
            known = inspect.signature(kind.__init__).parameters
            missing = ", ".join(name for name in DECISIVE if name in known)
            warnings.warn(
                f"{path} does not say how its images are normalised, so the model has no "
                f"preprocessor; give preprocessor={kind.__name__}({missing}), or preprocessor=None",
                stacklevel=5,
            )

    return {"preprocessor": arguments, "verify_preprocessor": warn}


log = logging.getLogger("kmodels")

# Pillow's numbers, in which Hugging Face writes them.
INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def _defaults(statistics: Any, resample: int, size: Any = 224, crops: bool = False) -> dict:
    mean, std = statistics
    named = {"resample": resample, "size": size, "do_center_crop": crops}
    return {"image_mean": mean, "image_std": std, **named}


# Default settings of every image processor, and those of each kind.
USUAL = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
    **{"rescale_factor": 1 / 255, "crop_size": 224, "max_num_patches": 256},
}
DEFAULTS = {
    "ViT": _defaults(HALF, 2),
    "DeiT": _defaults(HALF, 3, 256, crops=True),
    "Beit": _defaults(HALF, 3),
    "Bit": _defaults(CLIP, 3, crops=True),
    "CLIP": _defaults(CLIP, 3, crops=True),
    "Siglip": _defaults(HALF, 3, {"height": 224, "width": 224}),
    "Siglip2": _defaults(HALF, 2),
    "DINOv3ViT": _defaults(IMAGENET, 2),
    "Eomt": _defaults(IMAGENET, 2, 640),
}
# Kinds whose size is that of the shorter side if it is one number.
SHORTEST = ("Bit", "CLIP", "Siglip")
# Settings that are read, those without effect here, and those that must be off.
READ = {
    *("crop_size", "default_to_square", "do_center_crop", "do_normalize", "do_rescale"),
    *("do_resize", "do_split_image"),
    *("feature_extractor_type", "image_mean", "image_processor_type", "image_std", "do_pad"),
    *("max_num_patches", "pad_size", "patch_size", "resample", "rescale_factor", "size"),
}
IDLE = {
    # Images of Pillow and files become RGB, and arrays must have the model's channels.
    "do_convert_rgb",
    # Labels, and how Python calls the processor.
    *("_processor_class", "_valid_processor_keys", "auto_map", "data_format", "device"),
    *("disable_grouping", "do_reduce_labels", "ignore_index"),
    *("image_seq_length", "input_data_format", "num_labels", "processor_class", "reduce_labels"),
    *("return_tensors", "return_metadata"),
}
# Settings that change the labels of masks.
OF_LABELS = ("do_reduce_labels", "reduce_labels", "ignore_index")
# Names of attention parts in transformers 5, which it writes with `save_original_format=False`.
NEWER_ATTENTION: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\.attention\.([qkv])_proj\.": lambda m: f".attention.attention.{QUERY_KEY_VALUE[m[1]]}.",
    r"\.attention\.o_proj\.": ".attention.output.dense.",
}
QUERY_KEY_VALUE = {"q": "query", "k": "key", "v": "value"}
# The same of the blocks of ViT, DeiT, I-JEPA and MAE. Those of MAE's decoder are called
# `decoder_layers` in published files, and `decoder_encoder.layer` in those of transformers 5.
NEWER_BLOCKS: dict[str, str | Callable[[re.Match[str]], str]] = {
    **NEWER_ATTENTION,
    r"(^|\.|_)layers\.": r"\1encoder.layer.",
    r"\.mlp\.fc1\.": ".intermediate.dense.",
    r"\.mlp\.fc2\.": ".output.dense.",
}


Tensors = dict[str, LazyArray]


@dataclass(frozen=True)
class ViTFormat(EncoderDirectory):
    """Directories of transformers that hold a ViT, as `Family.formats` expects them.

    Args:
        kinds: `model_type` in their config.json.
        read: function of the path, the object in config.json, and the tensors by name, empty if
            the architecture alone is asked for; returns a `checkpoint`, or raises `InputError` for
            settings that the model has no counterpart for.
    """

    read: Callable[[Path, dict[str, Any], Tensors], SourceCheckpoint]

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Understands a directory, see `kmodels.registry.Format`."""
        read = self.read(path, description, self.tensors(path, description, weights))
        if overrides.get("use_mask_token") is not False:
            return read
        masks = {rule.source for rule in read.rules if rule.target == "tokens/mask_token"}
        return replace(read, tensors={k: x for k, x in read.tensors.items() if k not in masks})


def checkpoint(
    path: Path,
    backbone: dict[str, Any],
    task: dict[str, Any],
    tensors: Mapping[str, LazyArray],
    rules: Callable[[ViTConfig], Sequence[Rule]],
    positions: str = "",
    flat: bool = False,
    **notice: Any,
) -> SourceCheckpoint:
    """Returns the contents of a directory; arguments are as in `SourceCheckpoint`.

    `positions` is the name of the position embedding, which with `flat` is (rows, D) instead of
    (1, rows, D).
    """
    config = ViTConfig(**backbone)
    return SourceCheckpoint(
        path=path,
        kind="Hugging Face",
        backbone=backbone,
        task=task,
        **preprocessing(path, preprocessor(path, config)),
        tensors=tensors,
        rules=rules(config),
        fit=fitting(config, positions, flat),
        **notice,
    )


def backbone_fields(path: Path, description: Mapping[str, Any], patch: int = 16) -> dict[str, Any]:
    """Returns the fields of the config that all formats have; defaults may be left out.

    The description is the object in config.json, or its part about the images.

    Raises:
        InputError: for an activation or patches that the model has no counterpart for.
    """
    get = {key: value for key, value in description.items() if value is not None}.get
    patches = _pair(get("patch_size", patch))
    if patches[0] != patches[1]:
        raise InputError(f"{path}: patches of {patches} pixels; only square ones are supported")
    side = patches[0]
    # The convolution ignores the pixels after the last whole patch.
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
    a tokenizer as a part of processor_config.json. A setting that is not followed is logged.
    """
    described = _image_processor(path)
    if described is None:
        return None
    kind, channels = _kind(described), config.image_shape[2]
    of_kind = DEFAULTS.get(kind, DEFAULTS["ViT"])
    settings = {**USUAL, **of_kind, **{k: v for k, v in described.items() if v is not None}}
    ignored = [name for name in described if name not in READ | IDLE]
    if kind and kind not in DEFAULTS:
        ignored.append(f"image_processor_type={_class_of(described)!r}")
    resample = settings["resample"]
    if resample not in INTERPOLATION:
        ignored.append(f"resample={resample!r}")
    if settings["do_normalize"]:
        for name in ("image_mean", "image_std"):
            values = settings[name]
            if isinstance(values, list) and len(values) != channels and len(set(values)) > 1:
                ignored.append(f"{name}={values!r} for {channels} channels (the mean is taken)")
    arguments: dict[str, Any] = {
        **_statistics(settings, channels),
        "interpolation": INTERPOLATION.get(resample, "bilinear"),
        "image_size": config.image_shape[:2],
    }
    if kind == "Siglip2" or "max_num_patches" in described:
        # Images of whole patches, few enough for a row, are the only ones that transformers takes
        # without resizing; without enlarging they keep their size here.
        arguments |= {} if settings["do_resize"] else {"enlarge": False}
        if (patch := settings.get("patch_size", config.patch_size)) != config.patch_size:
            ignored.append(f"patch_size={patch!r}")
        return _logged(path, ignored, {**arguments, "max_num_patches": settings["max_num_patches"]})
    if kind == "Eomt":
        for key, way in (("do_pad", "pad"), ("do_split_image", "split")):
            arguments |= {"aspect_ratio": way} if settings.get(key) else {}
        way = arguments.get("aspect_ratio")
        if not settings["do_resize"] and way is not None:
            ignored.append(f"do_resize=False with aspect_ratio={way!r}")
        elif not settings["do_resize"]:
            arguments["aspect_ratio"] = "none"
        elif not _is_size_of(config.image_shape, settings["size"], way):
            ignored.append(f"size={settings['size']!r} with aspect_ratio={way or 'stretch'!r}")
        # Labels: transformers makes this number of 0, and counts the classes from 1.
        changes = {key: described.get(key) for key in OF_LABELS}
        ignored += [
            f"{key}={value!r}"
            for key, value in changes.items()
            if not (value is None or value is False)
        ]
        return _logged(path, ignored, arguments)
    is_square = settings.get("default_to_square", kind not in SHORTEST)
    size, crop = _size(settings["size"], not is_square), settings["do_center_crop"]
    pads = bool(settings.get("do_pad"))  # changes nothing if all images have the size already
    image_size = _size(settings["crop_size"], False) if crop else size
    if not settings["do_resize"]:
        arguments["resize_mode"] = "crop" if crop else "none"
        size, image_size = config.image_shape[:2], image_size if crop else config.image_shape[:2]
    if not isinstance(size, int | tuple) or not isinstance(image_size, int | tuple):
        ignored += [f"size={settings['size']!r}", *(["do_pad=True"] if pads else [])]
        return _logged(path, ignored, arguments)
    if isinstance(image_size, int):
        # transformers would give images of many shapes, of which a model takes one.
        ignored.append(f"size={settings['size']!r} without do_center_crop (the middle is taken)")
        ignored += ["do_pad=True"] if pads else []
        image_size = (image_size, image_size)
    elif pads and (pad := settings.get("pad_size")) and _size(pad, False) != image_size:
        ignored.append(f"do_pad=True with pad_size={pad!r}")
    if settings["do_resize"] and (crop or isinstance(size, int)):
        arguments["resize_size"] = size
    if image_size != config.image_shape[:2]:
        log.warning(
            "%s: the image processor makes images of %d x %d pixels and config.json is for %d x %d;"
            " with image_shape=%s both are as in transformers",
            *(path, *image_size, *config.image_shape[:2], (*image_size, channels)),
        )
    return _logged(path, ignored, {**arguments, "image_size": image_size})


def _is_size_of(shape: Sequence[int], size: Any, way: str | None) -> bool:
    """Returns True if a segmenter's images become those of its model, which are (H, W, C).

    One number is both edges; the way is "pad" or "split", or None to stretch images.
    """
    if not isinstance(size, Mapping):
        size = dict.fromkeys(("shortest_edge", "longest_edge"), size)
    edges = {"shortest_edge": shape[0], **({"longest_edge": shape[1]} if way == "pad" else {})}
    wanted = {"height": shape[0], "width": shape[1]} if way is None else edges
    return {name: x for name, x in size.items() if x is not None} == wanted


def _logged(path: Path, ignored: Sequence[str], arguments: dict[str, Any]) -> dict[str, Any]:
    if ignored:
        log.warning(
            "%s: the image processor sets %s, which kmodels does not follow",
            path,
            ", ".join(ignored),
        )
    return arguments


def _statistics(settings: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Returns mean and deviation of pixels in [0, 1], with the factor that scales them first."""
    mean, std = [0.0] * channels, [1.0] * channels
    if settings["do_normalize"]:
        mean, std = (_each(settings[f"image_{name}"], channels) for name in ("mean", "std"))
    factor = 255.0 * (settings["rescale_factor"] if settings["do_rescale"] else 1.0)
    if factor <= 0:
        raise InputError(
            f"rescale_factor is {settings['rescale_factor']}; give a number above 0, such as 1/255"
        )
    if math.isclose(factor, 1.0, rel_tol=1e-9):
        factor = 1.0
    return {"mean": tuple(x / factor for x in mean), "std": tuple(x / factor for x in std)}


def _each(value: float | Sequence[float], channels: int) -> list[float]:
    """Returns a number per channel; of another number of channels their mean for each."""
    values = [float(x) for x in (value if isinstance(value, Sequence) else (value,))]
    if not values:
        raise InputError(f"image_mean or image_std is empty; give {channels} numbers")
    return values if len(values) == channels else [sum(values) / len(values)] * channels


def _size(value: Any, shortest: bool) -> int | tuple[int, int] | None:
    """Returns (height, width), the length of the shorter side, or None for any other size.

    With `shortest` one number is the shorter side.
    """
    if isinstance(value, int | float):
        return int(value) if shortest else (int(value), int(value))
    if isinstance(value, Sequence):
        return (int(value[0]), int(value[1]))
    known = {name for name, x in value.items() if x is not None}
    if known == {"height", "width"}:
        return (int(value["height"]), int(value["width"]))
    return int(value["shortest_edge"]) if known == {"shortest_edge"} else None


def takes_patches(path: Path) -> bool:
    """Returns True if a directory's image processor keeps aspect ratios, as SigLIP 2's."""
    return _kind(_image_processor(path) or {}) == "Siglip2"


def _kind(described: Mapping[str, Any]) -> str:
    """Returns the kind of an image processor, without the endings of its class."""
    return re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", _class_of(described))


def _class_of(described: Mapping[str, Any]) -> str:
    names = ("image_processor_type", "feature_extractor_type")
    return next((str(described[key]) for key in names if described.get(key)), "")


def _image_processor(path: Path) -> dict[str, Any] | None:
    if (alone := path / "preprocessor_config.json").is_file():
        return read_json(alone)
    return read_optional(path / "processor_config.json").get("image_processor")


def picture_form(preprocessor: Any) -> dict[str, Any]:
    """Returns preprocessor_config.json for a preprocessor of images; {} without one.

    Args:
        preprocessor: a `ViTImageClassifierPreprocessor`, a `NaFlexViTImageClassifierPreprocessor`,
            or None.

    Raises:
        InputError: for one that transformers cannot express.
    """
    if preprocessor is None:
        return {}
    patches = hasattr(preprocessor, "max_num_patches")
    kind = _of_patches(preprocessor) if patches else _of_pictures(preprocessor)
    numbers = {name: number for number, name in INTERPOLATION.items()}
    return {
        **kind,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": numbers[preprocessor.interpolation],
        "image_mean": list(preprocessor.mean),
        "image_std": list(preprocessor.std),
    }


def _of_patches(preprocessor: Any) -> dict[str, Any]:
    # Without enlarging, transformers takes images of whole patches only, which are equal to ours.
    if not preprocessor.enlarge:
        log.warning(
            "preprocessor_config.json has do_resize=false for enlarge=False: transformers then "
            "takes only images of whole patches, at most %d",
            preprocessor.max_num_patches,
        )
    return {
        "image_processor_type": "Siglip2ImageProcessor",
        "do_resize": preprocessor.enlarge,
        "patch_size": preprocessor.patch_size,
        "max_num_patches": preprocessor.max_num_patches,
    }


def _of_pictures(preprocessor: Any) -> dict[str, Any]:
    preprocessor.check_plain("transformers' ViTImageProcessor")
    mode = preprocessor.resize_mode
    if mode in ("cover", "fit"):
        raise InputError(
            f"transformers' ViTImageProcessor has no counterpart for resize_mode={mode!r}; give "
            "'stretch', or the shorter side as resize_size"
        )
    if getattr(preprocessor, "rounds_center", False):
        log.warning(
            "transformers cuts the middle of an image out one pixel further left or up than timm "
            "where half a pixel is left; give rounds_center=False to cut as transformers does"
        )
    height, width = preprocessor.image_size
    way = getattr(preprocessor, "aspect_ratio", "stretch")
    if way == "slide":
        raise InputError(
            "transformers' EomtImageProcessor has no counterpart for aspect_ratio='slide'; give "
            "'split'"
        )
    resizes = {"do_resize": mode not in ("crop", "none")}
    whole = preprocessor.resize_size
    if way != "stretch":
        return resizes | {
            "image_processor_type": "EomtImageProcessor",
            "size": {"shortest_edge": height, "longest_edge": None if way == "split" else width},
            "do_pad": way == "pad",
            "do_split_image": way == "split",
        }
    if whole is None and mode != "crop":
        return resizes | {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": height, "width": width},
            "do_center_crop": False,
        }
    # Of the processors that stretch and of those that keep the shape, one that crops.
    if isinstance(whole, tuple):
        name, size = "DeiT", {"height": whole[0], "width": whole[1]}
    else:
        name, size = "CLIP", {"shortest_edge": whole or min(height, width)}
    return resizes | {
        "image_processor_type": f"{name}ImageProcessor",
        "size": size,
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
    }


def labels(description: Mapping[str, Any], tensors: Tensors, ending: str) -> int | None:
    """Returns the number of classes in config.json; None with tensors or another architecture."""
    named = any(name.endswith(ending) for name in description.get("architectures") or ())
    if tensors or not named:
        return None
    names = description.get("id2label")
    return len(names) if names else int(description.get("num_labels", 2))


def block_rules(source: str, target: str) -> list[Rule]:
    """Returns the table of the blocks of ViT, DeiT, I-JEPA and MAE, "{i}" for their number."""
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
    """Returns tensors by the names that transformers had before its version 5, by patterns."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, older in newer.items():
            name = re.sub(pattern, older, name)
        renamed[name] = tensor
    return renamed


def with_zero_biases(
    tensors: Mapping[str, LazyArray], attention: str, layers: int, width: int
) -> dict[str, LazyArray]:
    """Adds the biases that `qkv_bias=False` leaves out: the output projection keeps its own.

    `attention` is the name of what holds query, key and value, "{i}" for the number of the block.
    """
    completed = dict(tensors)
    for i in range(layers):
        for part in QUERY_KEY_VALUE.values():
            name = f"{attention.format(i=i)}.{part}"
            if f"{name}.weight" in tensors and f"{name}.bias" not in tensors:
                completed[f"{name}.bias"] = constant(0.0, (width,))
    return completed
