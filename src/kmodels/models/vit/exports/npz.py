"""A ViT as google-research writes it: the `.npz` files of vision_transformer and big_vision."""

from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.remote import write_file
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import augreg
from kmodels.weights import export

# The class token tells the names apart: with one they are the older names, which timm reads too.
OLDER = ("", "Transformer/posembed_input/pos_embedding", False)
NEWER = ("params/", "pos_embedding", True)
# These have no effect on what a model gives: rates of training, and how positions would be resized.
FREE = (
    *("dropout_rate", "attention_dropout", "drop_path_rate", "patch_drop_rate"),
    "position_interpolation",
)


def export_to_npz(model: keras.Model, path: str | Path) -> Path:
    """See `ViTBackbone.export_to_npz`.

    Args:
        model: a backbone or classifier.
        path: path of the file to make or replace, local or an address.

    Raises:
        InputError: for another suffix, or with all that such a file cannot express.
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
    tensors = export(model, augreg.rules(config, prefix, positions, big_vision))

    def write(temporary: Path) -> None:
        held: dict[str, Any] = {name: _floats(x.read()) for name, x in tensors.items()}
        with temporary.open("wb") as file:
            np.savez(file, **held)
        _check(temporary, config, settings)

    return write_file(path, write)


def _floats(array: np.ndarray) -> np.ndarray:
    """Widens bfloat16, which NumPy's files do not know."""
    return array if array.dtype == np.float16 else array.astype("float32")


def _check(path: Path, config: ViTConfig, settings: dict[str, Any]) -> None:
    """Raises where the file, read again, says less than the model."""
    found = augreg.open_checkpoint(path, {}, {}, weights=False)
    read = ViTConfig(**found.backbone).to_dict()
    wanted = config.to_dict()
    lost = [
        f"{name}={wanted[name]!r}"
        for name in wanted
        if name not in FREE and wanted[name] != read[name]
    ]
    if settings:
        usual = {"pooled_norm": False, "head_bias": True, "activation": "linear", **found.task}
        usual["num_classes"] = found.task["num_classes"] or 0
        lost += [
            f"{name}={settings[name]!r}"
            for name, value in usual.items()
            if settings.get(name) != value
        ]
    if lost:
        raise InputError(f"an .npz file has no place for {', '.join(lost)}; write hf or timm")
