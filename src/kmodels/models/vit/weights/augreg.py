"""`.npz` files of google-research, read and written: vision_transformer (AugReg) and big_vision.

They are read as timm reads them, with which their published accuracy is mostly compared: exact
GELU (the JAX code used the tanh form: give `approximate_gelu=True` for it), and bilinear resizing
of position embeddings at pixel centres.
"""

import re
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.remote import write_file
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights.resizing import fitting
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, export, read_npz, reshape
from kmodels.weights.positions import table_grid


def attention(config: ViTConfig, source: str, target: str, output: str = "out") -> list[Rule]:
    """Kernels (D, N, H) and biases (N, H) of query, key and value, and (N, H, D) of the output.

    `source` and `target` are paths of the attention, `output` is a name in the file.
    """
    width, heads = config.hidden_dim, config.num_heads
    kernel = reshape((width, heads, width // heads), (width, width))
    bias = reshape((heads, width // heads), (width,))
    joined = reshape((heads, width // heads, width), (width, width))
    table = [
        Rule(f"{source}/{output}/kernel", f"{target}/output/kernel", joined),
        Rule(f"{source}/{output}/bias", f"{target}/output/bias"),
    ]
    for part in ("query", "key", "value"):
        table.append(Rule(f"{source}/{part}/kernel", f"{target}/{part}/kernel", kernel))
        table.append(Rule(f"{source}/{part}/bias", f"{target}/{part}/bias", bias))
    return table


def patches(config: ViTConfig, source: str) -> list[Rule]:
    """Kernel (P, P, C, D) and bias of the convolution that cuts an image into patches."""
    width, patch, channels = config.hidden_dim, config.patch_size, config.image_shape[2]
    flat = reshape((patch, patch, channels, width), (patch * patch * channels, width))
    return [
        Rule(f"{source}/kernel", "patch_embedding/kernel", flat),
        Rule(f"{source}/bias", "patch_embedding/bias"),
    ]


PREFIXES = ("opt/target/", "params/img/", "params/", "")


def rules(config: ViTConfig, prefix: str, positions: str, big_vision: bool) -> list[Rule]:
    """Returns the table; `prefix` is that of all names, `positions` a name without it.

    The parts of a block are numbered in one way by vision_transformer, in another by big_vision.
    """

    def both(source: str, target: str, weight: str) -> list[Rule]:
        return [Rule(f"{source}/{x}", f"{target}/{x}") for x in (weight, "bias")]

    block = "Transformer/encoderblock_{i}"
    mha, mlp, norm = (0, 0, 1) if big_vision else (1, 3, 2)
    table = [
        Rule("cls", "tokens/class_token"),
        Rule(positions, "tokens/position_embedding"),
        *patches(config, "embedding"),
        Rule("MAPHead_0/probe", "pooling/probe"),
        *attention(config, f"{block}/MultiHeadDotProductAttention_{mha}", "block_{i}/attention"),
        *attention(config, "MAPHead_0/MultiHeadDotProductAttention_0", "pooling/attention"),
        *both(f"{block}/LayerNorm_0", "block_{i}/attention_norm", "scale"),
        *both(f"{block}/LayerNorm_{norm}", "block_{i}/mlp_norm", "scale"),
        *both(f"{block}/MlpBlock_{mlp}/Dense_0", "block_{i}/mlp/up", "kernel"),
        *both(f"{block}/MlpBlock_{mlp}/Dense_1", "block_{i}/mlp/down", "kernel"),
        *both("Transformer/encoder_norm", "final_norm", "scale"),
        *both("MAPHead_0/LayerNorm_0", "pooling/mlp_norm", "scale"),
        *both("MAPHead_0/MlpBlock_0/Dense_0", "pooling/mlp/up", "kernel"),
        *both("MAPHead_0/MlpBlock_0/Dense_1", "pooling/mlp/down", "kernel"),
        *both("pre_logits", "pre_logits", "kernel"),
        *both("head", "logits", "kernel"),
    ]
    return [Rule(prefix + rule.source, rule.target, rule.transform) for rule in table]


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Returns True for an `.npz` file."""
    return path.suffix == ".npz" and path.is_file()


def open_checkpoint(
    path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
) -> SourceCheckpoint:
    """Understands a file; the whole architecture is read off the shapes.

    They may fit several image sizes; `overrides` then has to name one.

    Raises:
        InputError: for a file that holds no ViT.
    """
    tensors = _unstacked(read_npz(path))
    prefix = next((x for x in PREFIXES if f"{x}embedding/kernel" in tensors), None)
    if prefix is None:
        raise InputError(
            f"{path} is not a ViT of vision_transformer or big_vision: no embedding/kernel"
        )
    if prefix == "params/img/":
        # SigLIP's files also hold the text tower and its temperature.
        tensors = {name: x for name, x in tensors.items() if name.startswith(prefix)}
    big_vision = f"{prefix}pos_embedding" in tensors
    positions = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    if (absent := prefix + positions) not in tensors:
        raise InputError(f"{path} has no {absent}; only learned position embeddings are supported")
    block = f"{prefix}Transformer/encoderblock_"
    layers = {int(m[1]) for x in tensors if (m := re.match(rf"{re.escape(block)}(\d+)/", x))}
    first = f"{block}0/MultiHeadDotProductAttention_{0 if big_vision else 1}/query/kernel"
    up = f"{block}0/MlpBlock_{0 if big_vision else 3}/Dense_0/kernel"
    if absent := [name for name in (first, up) if name not in tensors]:
        raise InputError(f"{path} is not a known ViT: it lacks {', '.join(absent)}")
    patch, _, channels, width = tensors[f"{prefix}embedding/kernel"].shape
    rows = tensors[prefix + positions].shape[1]
    has_class = f"{prefix}cls" in tensors
    shape = overrides.get("image_shape")
    grids = [(shape[0] // patch, shape[1] // patch)] if shape else []
    # big_vision adds the positions before the class token, vision_transformer after it.
    fronts = (0,) if not has_class else (0, 1) if big_vision else (1, 0)
    if "position_over_prefix" in overrides:
        fronts = (int(has_class and overrides["position_over_prefix"]),)
    grid = table_grid(f"{path}: {prefix}{positions}", rows, fronts, grids)
    backbone = {
        "image_shape": (grid[0] * patch, grid[1] * patch, channels),
        "patch_size": patch,
        "num_layers": len(layers),
        "num_heads": tensors[first].shape[1],
        "hidden_dim": width,
        "mlp_dim": tensors[up].shape[1],
        "layer_norm_epsilon": 1e-6,
        "use_class_token": has_class,
        "position_over_prefix": rows > grid[0] * grid[1] or not has_class,
        "position_interpolation": "bilinear",
    }
    config = ViTConfig(**backbone)
    head = tensors.get(f"{prefix}head/kernel")
    middle = tensors.get(f"{prefix}pre_logits/kernel")
    pooling = "map" if f"{prefix}MAPHead_0/probe" in tensors else "token" if has_class else "gap"

    return SourceCheckpoint(
        path=path,
        kind="AugReg",
        backbone=backbone,
        task={
            "num_classes": None if head is None else head.shape[1],
            "pooling": pooling,
            "intermediate_dim": None if middle is None else middle.shape[1],
        },
        preprocessor={
            "image_size": config.image_shape[:2],
            "mean": (0.5,) * config.image_shape[2],
            "std": (0.5,) * config.image_shape[2],
            "interpolation": "bilinear",
        },
        tensors=tensors,
        rules=rules(config, prefix, positions, big_vision),
        fit=fitting(config, prefix + positions),
    )


def _unstacked(tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the blocks of files that keep each tensor of all blocks in one, as SigLIP 2's do."""
    unstacked: dict[str, LazyArray] = {}

    @lru_cache(maxsize=1)  # the blocks of a tensor are asked for one after the other
    def whole(name: str) -> np.ndarray:
        return tensors[name].read()

    for name, stack in tensors.items():
        start, there, part = name.partition("Transformer/encoderblock/")
        if not there:
            unstacked[name] = stack
            continue
        for i in range(stack.shape[0]):
            block = f"{start}Transformer/encoderblock_{i}/{part}"
            read = partial(lambda name, i: whole(name)[i], name, i)
            unstacked[block] = LazyArray(stack.shape[1:], stack.dtype, read)
    return unstacked


# The class token tells the names apart: with one they are the older names, which timm reads too.
OLDER = ("", "Transformer/posembed_input/pos_embedding", False)
NEWER = ("params/", "pos_embedding", True)
# Fields without effect on the outputs: dropout rates, and how positions would be resized.
FREE = (
    *("dropout_rate", "attention_dropout", "drop_path_rate", "patch_drop_rate"),
    "position_interpolation",
)


def export_to_npz(model: keras.Model, path: str | Path) -> Path:
    """See `ViTBackbone.export_to_npz`.

    Raises:
        InputError: for another suffix, or listing the settings that such a file cannot express.
    """
    if Path(path).suffix != ".npz":
        raise InputError(f"{path} must be an .npz file; give a name that ends in .npz")
    backbone = getattr(model, "backbone", model)
    config, settings = backbone.config, getattr(model, "settings", {})
    if not config.use_mha_bias or not config.use_mlp_bias or not config.use_patch_bias:
        raise InputError("the format cannot hold linear layers without biases; write hf or timm")
    if config.grid[0] != config.grid[1]:
        raise InputError(
            f"the format holds only square images, not {config.grid[0]} x {config.grid[1]} "
            "patches; write hf or timm"
        )
    prefix, positions, big_vision = OLDER if config.use_class_token else NEWER
    tensors = export(model, rules(config, prefix, positions, big_vision))

    def write(temporary: Path) -> None:
        arrays: dict[str, Any] = {name: x.read() for name, x in tensors.items()}
        for name, array in arrays.items():
            if array.dtype != np.float16:  # NumPy's files do not know bfloat16
                arrays[name] = array.astype("float32")
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
        _check(temporary, config, settings)

    return write_file(path, write)


def _check(path: Path, config: ViTConfig, settings: dict[str, Any]) -> None:
    """Raises `InputError` if the file, read again, lacks settings of the model."""
    checkpoint = open_checkpoint(path, {}, {}, weights=False)
    read = ViTConfig(**checkpoint.backbone).to_dict()
    wanted = config.to_dict()
    lost = [
        f"{name}={wanted[name]!r}"
        for name in wanted
        if name not in FREE and wanted[name] != read[name]
    ]
    if settings:
        usual = {"pooled_norm": False, "head_bias": True, "activation": "linear", **checkpoint.task}
        usual["num_classes"] = checkpoint.task["num_classes"] or 0
        lost += [
            f"{name}={settings[name]!r}"
            for name, value in usual.items()
            if settings.get(name) != value
        ]
    if lost:
        raise InputError(f"an .npz file has no place for {', '.join(lost)}; write hf or timm")
